"""The verbs generate, translate and evaluate, as a user meets them."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import transformers

import sublayer
from sublayer.cli import main
from sublayer.lm import LM
from test_chat import CHATML
from test_lm import CORPUS, PROMPTS, bert, byte_pairs, gpt2_config, read, sentence_pieces, write


@pytest.fixture(scope="module")
def talker(tmp_path_factory: Any) -> Path:
    tokenizer = byte_pairs()
    tokenizer.chat_template = CHATML
    config = gpt2_config(tokenizer, n_positions=400)
    return write(tmp_path_factory.mktemp("talker"), "GPT2LMHeadModel", config, tokenizer)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: Any) -> Path:
    tokenizer = sentence_pieces()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<de>", ">>zh<<"]})
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return write(tmp_path_factory.mktemp("translator"), "T5ForConditionalGeneration", config, tokenizer)


def said(capsys: Any, *arguments: Any) -> str:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refused(capsys: Any, *arguments: Any) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("sublayer: ")
    return captured.err


def typed(monkeypatch: Any, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


# generate


def test_generate(talker, capsys, monkeypatch):
    lm = sublayer.load(talker)
    text = lm.generate("The quick", max_new_tokens=12)
    assert said(capsys, "generate", talker, "The quick", "--max-new-tokens", 12) == text + "\n"
    stop = text[4:6]
    assert said(capsys, "generate", talker, "The quick", "--stop", stop, "--stop", "~~") == text.split(stop)[0] + "\n"
    beams = lm.generate("The quick", max_new_tokens=8, num_beams=3, length_penalty=2.0)
    options = ["--num-beams", 3, "--length-penalty", 2.0, "--max-new-tokens", 8]
    assert said(capsys, "generate", talker, "The quick", *options) == beams + "\n"
    typed(monkeypatch, "The quick", "", "Paris")
    rows = [json.loads(line) for line in said(capsys, "generate", talker, "--json").splitlines()]
    assert [row["prompt"] for row in rows] == ["The quick", "Paris"]
    for row in rows:
        detail = lm.generate_details(row["prompt"])[0]
        assert (row["text"], row["ids"], row["finish_reason"]) == (detail.text, detail.ids, detail.finish_reason)
        assert row["logprobs"] == pytest.approx(detail.logprobs)


def test_guesses_change_no_text(talker, translator, capsys):
    for model in (talker, translator):
        plain = said(capsys, "generate", model, "The quick the quick", "--temperature", 0.9, "--seed", 3)
        for guesser in (["--lookup"], ["--draft", model]):
            options = ["--temperature", 0.9, "--seed", 3, *guesser]
            assert said(capsys, "generate", model, "The quick the quick", *options) == plain
    assert "the draft" in refused(capsys, "generate", talker, "The quick", "--draft", translator)


def test_one_question(talker, capsys):
    expected = sublayer.load(talker).chat(
        [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hi"}], max_new_tokens=9
    )
    options = ["--chat", "--system", "Brief.", "--max-new-tokens", 9]
    assert said(capsys, "generate", talker, "Hi", *options) == expected + "\n"
    assert json.loads(said(capsys, "generate", talker, "Hi", *options, "--json"))["text"] == expected


@pytest.fixture
def heard(monkeypatch: Any) -> list[list[tuple[str, str]]]:
    """The conversations that the model is asked to answer; it answers "A1", "A2" … in two pieces."""
    conversations: list[list[tuple[str, str]]] = []

    def answer(self: LM, messages: Any, **options: Any) -> Any:
        conversations.append([(message["role"], message["content"]) for message in messages])
        if messages[-1]["content"] == "too much":
            raise ValueError("too long")
        if messages[-1]["content"] == "nothing":
            raise KeyboardInterrupt
        yield "A"
        if messages[-1]["content"] == "interrupt":
            raise KeyboardInterrupt
        yield str(len(conversations))

    monkeypatch.setattr(LM, "stream_chat", answer)
    return conversations


def test_a_conversation_remembers(talker, heard, capsys, monkeypatch):
    typed(monkeypatch, "one", "/system Be kind", "", "two", "/clear", "three", "/system", "four", "/quit", "five")
    assert said(capsys, "generate", talker, "--chat").splitlines() == ["A1", "A2", "A3", "A4"]
    kind = ("system", "Be kind")
    assert heard == [
        [("user", "one")],
        [kind, ("user", "one"), ("assistant", "A1"), ("user", "two")],
        [kind, ("user", "three")],
        [("user", "three"), ("assistant", "A3"), ("user", "four")],
    ]


def test_an_interruption_stops_the_answer_and_an_error_the_question(talker, heard, capsys, monkeypatch):
    typed(monkeypatch, "interrupt", "too much", "nothing", "/help", "/quiet", "last")
    out = said(capsys, "generate", talker, "--chat", "--system", "S").splitlines()
    assert out[0] == "A …" and "too long" in out[1] and "/clear" in out[3] and "did you mean '/quit'" in out[4]
    assert out[5] == "A4"
    before = [("system", "S"), ("user", "interrupt"), ("assistant", "A")]
    assert heard[1:] == [[*before, ("user", word)] for word in ("too much", "nothing", "last")]


ROWS: list[dict[str, Any]] = [
    {"prompt": "The quick"},
    {"messages": [{"role": "user", "content": "今天"}]},
    {"prompt": "Paris", "id": 7},
]


def batch_file(folder: Path, rows: list[Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_batch_goes_on_where_it_was_stopped(talker, tmp_path, capsys, monkeypatch):
    lm = sublayer.load(talker)
    expected = [lm.generate("The quick", max_new_tokens=6), lm.chat(ROWS[1]["messages"], max_new_tokens=6)]
    expected.append(lm.generate("Paris", max_new_tokens=6))
    source, target = batch_file(tmp_path, ROWS), tmp_path / "out.jsonl"
    arguments = ["generate", talker, "--batch", source, target, "--max-new-tokens", 6]
    said(capsys, *arguments)
    whole = target.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [(row["row"], row["text"]) for row in rows] == list(enumerate(expected, 1))
    asked: list[str] = []
    details = LM.generate_details
    monkeypatch.setattr(
        LM, "generate_details", lambda self, text, **options: asked.append(text) or details(self, text, **options)
    )
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 3, ends[0] - 1, ends[0], ends[1] + 12, len(whole) - 1, len(whole)):
        target.write_bytes(whole[:cut])
        asked.clear()
        said(capsys, *arguments)
        assert target.read_bytes() == whole
        lines_before = sum(end <= cut for end in ends)
        assert asked == [row["prompt"] for row in ROWS[lines_before:] if "prompt" in row]


def test_a_batch_writes_over_no_other_file(talker, tmp_path, capsys):
    source, target = batch_file(tmp_path, ROWS), tmp_path / "notes.txt"
    for content in ("my notes", "my notes\n", '{"row": 2, "text": ""}\n', '{"row": 1, "text": ""}\nmy notes'):
        target.write_text(content)
        assert "no answer of a batch" in refused(capsys, "generate", talker, "--batch", source, target)
        assert target.read_text() == content
    assert "no answer of a batch" in refused(capsys, "generate", talker, "--batch", source, source)
    target.write_text("".join(f'{{"row": {n}, "text": ""}}\n' for n in range(1, 6)))
    assert "5 answers" in refused(capsys, "generate", talker, "--batch", source, target)


def test_a_row_that_cannot_be_answered_does_not_stop_the_others(talker, tmp_path, capsys):
    source, target = batch_file(tmp_path, [{"prompt": "word " * 500}, *ROWS[:1]]), tmp_path / "out.jsonl"
    assert main(["generate", str(talker), "--batch", str(source), str(target), "--max-new-tokens", "2"]) == 1
    assert "1 of 2 rows" in capsys.readouterr().err
    first, second = map(json.loads, target.read_text().splitlines())
    assert "positions" in first["error"] and second["text"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected"),
        ({"text": "a"}, "expected"),
        ({"prompt": "a", "messages": []}, "expected"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": [{"role": "user"}]}, "content"),
    ],
)
def test_a_wrong_row_is_told_before_anything_is_done(row, words, talker, tmp_path, capsys):
    source, target = batch_file(tmp_path, [*ROWS, row]), tmp_path / "out.jsonl"
    error = refused(capsys, "generate", talker, "--batch", source, target)
    assert f"{source}, row 4" in error and words in error
    assert not target.exists()


def test_wrong_options_of_generate(talker, translator, tmp_path, capsys):
    assert "--batch" in refused(capsys, "generate", talker, "a", "--batch", "in", "out")
    assert "in.jsonl" in refused(capsys, "generate", talker, "--batch", tmp_path / "in.jsonl", tmp_path / "out")
    assert "--chat" in refused(capsys, "generate", talker, "a", "--system", "b")
    assert "PROMPT" in refused(capsys, "generate", talker, "--chat", "--json")
    assert "chat template" in refused(capsys, "generate", translator, "--chat")
    assert "num_beams" in refused(capsys, "generate", talker, "a", "--num-beams", 0)


# translate


def test_translate(translator, tmp_path, capsys, monkeypatch):
    lm = sublayer.load(translator)
    options = ["--max-new-tokens", 8, "--num-beams", 2]
    expected = [lm.generate(text, max_new_tokens=8, num_beams=2) for text in PROMPTS]
    assert said(capsys, "translate", translator, *PROMPTS, *options) == "\n".join(expected) + "\n"
    lines = [PROMPTS[0], "", *PROMPTS[1:] * 20, "  "]
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert said(capsys, "translate", translator, "--input", source, "--output", target, *options) == ""
    answers = dict(zip(PROMPTS, expected, strict=True))
    assert target.read_text(encoding="utf-8").split("\n") == [*(answers.get(line, "") for line in lines), ""]
    for to, token in (("de", "<de>"), ("zh", ">>zh<<")):
        typed(monkeypatch, "Paris")
        answer = lm.generate(f"{token} Paris", max_new_tokens=8)
        assert said(capsys, "translate", translator, "--to", to, "--max-new-tokens", 8) == answer + "\n"


def test_wrong_options_of_translate(talker, translator, tmp_path, capsys):
    path = tmp_path / "in.txt"
    path.write_bytes(b"fine\n\xff\xfe\n")
    assert "encoder-decoder" in refused(capsys, "translate", talker, "a")
    assert "<fr>" in refused(capsys, "translate", translator, "a", "--to", "fr")
    assert "not both" in refused(capsys, "translate", translator, "a", "--input", path)
    assert "input itself" in refused(capsys, "translate", translator, "--input", path, "--output", path)
    assert "UTF-8" in refused(capsys, "translate", translator, "--input", path, "--output", tmp_path / "out.txt")
    assert "absent" in refused(capsys, "translate", translator, "--input", tmp_path / "absent")


# evaluate


def test_translations_are_measured_as_sacrebleu_does(translator, tmp_path, capsys):
    lm = sublayer.load(translator)
    sources = [f"{first} {second}" for first in PROMPTS for second in CORPUS]
    produced = [lm.generate(text, max_new_tokens=8) for text in sources]
    expected = [text if n % 2 else " ".join([text, "more", "words"]) for n, text in enumerate(produced)]
    kept = [n for n, text in enumerate(expected) if text.strip()]
    domains = ["even", "odd"]
    path = tmp_path / "pairs.jsonl"
    lines = [{"en": sources[n], "xx": expected[n], "kind": domains[n % 2]} for n in kept]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ["--source", "en", "--target", "xx", "--domain", "kind", "--max-new-tokens", 8]
    result = json.loads(said(capsys, "evaluate", translator, "--data", path, *names, "--json"))
    for name, rows in (("", kept), ("even", [n for n in kept if n % 2 == 0]), ("odd", [n for n in kept if n % 2])):
        found = result["domains"][name] if name else result
        texts, right = [produced[n] for n in rows], [[expected[n] for n in rows]]
        assert found["rows"] == len(rows)
        assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, right).score)
        assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(texts, right).score)
        assert found["exact_match"] == sum(n % 2 for n in rows) / len(rows)
    some = json.loads(said(capsys, "evaluate", translator, "--data", path, *names, "--json", "--metric", "chrf"))
    assert some["chrf"] == result["chrf"] and "bleu" not in some and "bleu" not in some["domains"]["odd"]
    table = said(capsys, "evaluate", translator, "--data", path, *names, "--limit", 2)
    assert "chrf" in table and "even" in table and "rows           2" in table


def test_perplexity_is_that_of_transformers(talker, tmp_path, capsys):
    text = "\n".join(CORPUS) + "\n"
    (tmp_path / "short.txt").write_text(text, encoding="utf-8")
    model, tokenizer = read("GPT2LMHeadModel", talker), transformers.AutoTokenizer.from_pretrained(talker)
    ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
    assert 1 < ids.size(1) <= 400
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    found = json.loads(said(capsys, "evaluate", talker, "--data", tmp_path / "short.txt", "--json"))
    assert found["tokens"] == ids.size(1) - 1
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(
        loss * (ids.size(1) - 1) / math.log(2) / len(text.encode()), rel=1e-5
    )


def test_every_token_of_a_long_text_is_measured_once(talker, tmp_path, capsys):
    text = "".join(f"{n} {CORPUS[n % len(CORPUS)]}\n" for n in range(1100))  # longer than a window, and than a piece
    assert len(text.encode()) > 64 << 10
    rows = [text[:3000], "", text[3000:6000], "a"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    lm = sublayer.load(talker)
    count = len(lm.tokenizer.encode(text))
    assert (
        json.loads(said(capsys, "evaluate", talker, "--data", tmp_path / "long.txt", "--json"))["tokens"] == count - 1
    )
    count = sum(len(lm.tokenizer.encode(row)) - 1 for row in rows if row)
    data = ["--data", tmp_path / "rows.jsonl", "--source", "body", "--metric", "loss"]
    found = json.loads(said(capsys, "evaluate", talker, *data, "--json"))
    assert found["tokens"] == count and "perplexity" not in found


def test_accuracy_is_the_share_of_right_labels(tmp_path, capsys):
    names = ["bad", "good", "7"]
    labels = dict(id2label=dict(enumerate(names)), label2id={name: n for n, name in enumerate(names)})
    folder = bert(tmp_path / "model", "BertForSequenceClassification", **labels)
    pipeline = transformers.pipeline("text-classification", str(folder), device=torch.get_default_device())
    texts = [f"{first} {second}" for first in PROMPTS for second in CORPUS]
    theirs = [entry["label"] for entry in pipeline(texts)]
    given = [names[(names.index(label) + n % 3 // 2) % 3] for n, label in enumerate(theirs)]  # every third is wrong
    given = [str(names.index(label)) if n % 5 == 0 else label for n, label in enumerate(given)]
    path = tmp_path / "data.csv"
    path.write_text(
        "text,label\n" + "".join(f'"{t}",{g}\n' for t, g in zip(texts, given, strict=True)), encoding="utf-8"
    )
    found = json.loads(said(capsys, "evaluate", folder, "--data", path, "--json"))
    assert found == {"rows": len(texts), "accuracy": pytest.approx(2 / 3)}
    path.write_text("text,label\na,good\nb,godo\n")
    error = refused(capsys, "evaluate", folder, "--data", path)
    assert "row 3" in error and "did you mean 'good'?" in error


def test_wrong_options_of_evaluate(talker, translator, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a text\n")
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.tsv").write_text("source\ttarget\na\tb\n")
    data = ["--data", tmp_path / "a.txt"]
    assert "did you mean 'perplexity'" in refused(capsys, "evaluate", talker, *data, "--metric", "perplexty")
    assert "'bleu'" in refused(capsys, "evaluate", talker, *data, "--metric", "bleu")
    assert "--limit" in refused(capsys, "evaluate", talker, *data, "--limit", 0)
    assert "two tokens" in refused(capsys, "evaluate", talker, "--data", tmp_path / "one.jsonl")
    assert "plain text" in refused(capsys, "evaluate", translator, *data)
    assert "'de'" in refused(capsys, "evaluate", translator, "--data", tmp_path / "b.tsv", "--target", "de")
    assert "absent" in refused(capsys, "evaluate", talker, "--data", tmp_path / "absent.txt")
    masked = bert(tmp_path / "masked", "BertForMaskedLM")
    assert "'mlm'" in refused(capsys, "evaluate", masked, *data)
