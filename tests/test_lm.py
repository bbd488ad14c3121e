"""`sublayer.load`: text in and text out, against what `transformers` says about the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import sublayer
from sublayer.data import Tokenizer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "A film that is a joy to watch, from the first scene to the last!",
    "Paris is the capital of France, and Berlin is the capital of Germany.",
    "今天天气很好，我们去公园散步吧。",
    "机器学习模型需要很多数据 🚀 and a lot of patience 🙂.",
    "Naïve café owners don't like 12345 puzzles…",
]
SENTENCES = ["The fox jumps.", "Paris is the capital of France, and a joy to watch!", "dog", "the last scene 今天"]
PROMPTS = ["The quick", "Paris is the capital of France, and", "今天天气 🚀", "a"]
BERT_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
TEXT = "今天 is 很好 🚀🙂 naïve."  # what the model that can only recite says
BERT_SIZES: dict[str, Any] = dict(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, max_position_embeddings=64
)


def word_pieces() -> Any:
    """The trainer for word pieces gives another result each time; that for byte pairs does not, so its pieces serve."""
    out = tokenizers.Tokenizer(models.BPE())
    out.normalizer, out.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    out.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=140))
    pieces = sorted(out.get_vocab())
    names = [*BERT_SPECIAL.values(), *pieces, *("##" + piece for piece in pieces)]
    out.model = models.WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    out.add_special_tokens(list(BERT_SPECIAL.values()))
    out.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, out.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    )
    out.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=out, **{f"{k}_token": v for k, v in BERT_SPECIAL.items()})


def byte_pairs() -> Any:
    """So few merges that a Chinese character, or an emoji, is several tokens."""
    out = tokenizers.Tokenizer(models.BPE())
    out.pre_tokenizer, out.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    out.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=out, eos_token="<|end|>", bos_token="<|end|>")


def sentence_pieces() -> Any:
    """In the form of SentencePiece, though merged: the trainer for its own kind gives another result each time."""
    out = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    out.pre_tokenizer, out.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    out.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=160, special_tokens=["<pad>", "</s>", "<unk>"]))
    out.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=out, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def write(folder: Path, name: str, config: Any, tokenizer: Any, seed: int = 0) -> Path:
    """A random model, its norms and biases too, and its tokenizer, written by transformers."""
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.3 + (1.0 if "norm" in key.lower() and tensor.dim() == 1 else 0))
    model.tie_weights()
    return save(folder, model, tokenizer)


def save(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read(name: str, folder: Path) -> Any:
    return getattr(transformers, name).from_pretrained(folder).eval().to(torch.get_default_device())


def bert(folder: Path, name: str, **more: Any) -> Path:
    tokenizer = word_pieces()
    return write(folder, name, transformers.BertConfig(vocab_size=len(tokenizer), **BERT_SIZES, **more), tokenizer)


def gpt2_config(tokenizer: Any, **more: Any) -> Any:
    sizes = dict(n_embd=24, n_layer=2, n_head=4, n_positions=96, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2Config(**(dict(vocab_size=len(tokenizer), tie_word_embeddings=False) | sizes | more))


@pytest.fixture(scope="module")
def bert_model(tmp_path_factory: Any) -> Path:
    return bert(tmp_path_factory.mktemp("bert"), "BertModel")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: Any) -> Path:
    return bert(tmp_path_factory.mktemp("masked"), "BertForMaskedLM")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: Any) -> Path:
    tokenizer = byte_pairs()
    return write(tmp_path_factory.mktemp("gpt2"), "GPT2LMHeadModel", gpt2_config(tokenizer), tokenizer)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: Any) -> Path:
    tokenizer = sentence_pieces()
    config = transformers.T5Config(
        vocab_size=len(tokenizer) + 28, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_decoder_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    return write(tmp_path_factory.mktemp("t5"), "T5ForConditionalGeneration", config, tokenizer)


def reciter(folder: Path, tokenizer: Any, ids: list[int]) -> Path:
    """A GPT-2 that says these ids and its end, whatever it reads: the position alone decides the next token."""
    model = transformers.GPT2LMHeadModel(gpt2_config(tokenizer, n_embd=96, n_head=2, n_layer=1, n_positions=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wpe.weight.copy_(torch.eye(64, 96))
        for place, token in enumerate(ids):
            model.lm_head.weight[token, place] = 1
        model.lm_head.weight[0, len(ids) :] = 1
    return save(folder, model.eval(), tokenizer)


GENERATORS = {"gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration"}


def their_answers(folder: Path, kind: str, texts: Iterable[str], count: int) -> list[list[int]]:
    """The new tokens of each text alone, by their own greedy generation."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), read(GENERATORS[kind], folder)
    rows = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
        new = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        rows.append(new[0, ids.size(1) if kind == "gpt2" else 1 :].tolist())
    return rows


def words(folder: Path, rows: list[list[int]]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def refusal(call: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked by the caller
        call()
    message = str(error.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("kind", ["bert_model", "masked", "gpt2", "t5"])
def test_parts(kind, request):
    folder = request.getfixturevalue(kind)
    lm = sublayer.load(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert isinstance(lm.model, torch.nn.Module) and not lm.model.training
    assert lm.config is lm.model.config
    assert lm.config.vocab_size == json.loads((folder / "config.json").read_text())["vocab_size"]
    for text in [*SENTENCES, *CORPUS]:
        ids = theirs(text).input_ids
        assert lm.tokenizer.encode(text) == ids
        assert lm.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for name in ("mask", "pad", "eos", "bos"):
        assert lm.tokenizer.special(name) == getattr(theirs, f"{name}_token_id")


@pytest.mark.parametrize("kind", GENERATORS)
def test_generate(kind, request):
    folder = request.getfixturevalue(kind)
    lm = sublayer.load(folder)
    expected = words(folder, their_answers(folder, kind, PROMPTS, 20))
    assert len(set(expected)) == len(PROMPTS)
    assert lm.generate(PROMPTS, max_new_tokens=20) == expected
    assert [lm.generate(text, max_new_tokens=20) for text in PROMPTS] == expected
    assert lm.generate(PROMPTS[:1], max_new_tokens=20) == expected[:1]
    for text, answer in zip(PROMPTS, expected, strict=True):
        assert "".join(lm.stream(text, max_new_tokens=20)) == answer


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_rows_of_a_list_end_where_they_end_alone(kind, place, request, tmp_path):
    """The end is an ordinary token here, so that nothing hides what is filled in after it."""
    folder = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "copy"))
    rows = their_answers(folder, kind, PROMPTS, 20)
    end = next(token for token in rows[0][3:] if token not in rows[0][:3] and token > 2)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        values["eos_token_id"] = [1, end] if name == place == "generation_config.json" else end
        if name == "config.json" != place:
            values["eos_token_id"] = 1
        (folder / name).write_text(json.dumps(values))
    rows = their_answers(folder, kind, PROMPTS, 20)
    assert len(rows[0]) < 20 and len({len(row) for row in rows}) > 1
    lm = sublayer.load(folder)
    assert lm.generate(PROMPTS, max_new_tokens=20) == words(folder, rows)
    assert "".join(lm.stream(PROMPTS[0], max_new_tokens=20)) == words(folder, rows)[0]
    lm.save(tmp_path / "again")
    sublayer.load(tmp_path / "again").save(tmp_path / "again")
    assert their_answers(tmp_path / "again", kind, PROMPTS, 20) == rows


def check_pieces(lm: Any, text: str, count: int) -> list[str]:
    """Wherever an answer is cut, its pieces are the answer, and only the last may lack the rest of its character."""
    for cut in range(1, count + 1):
        pieces = list(lm.stream(text, max_new_tokens=cut))
        assert "".join(pieces) == lm.generate(text, max_new_tokens=cut)
        assert all(pieces) and not any(piece.endswith("�") for piece in pieces[:-1])
    return pieces


def test_pieces_are_whole_characters(tmp_path):
    tokenizer = byte_pairs()
    ids = tokenizer(TEXT).input_ids
    assert max(len(tokenizer(letter).input_ids) for letter in TEXT) >= 3
    folder = reciter(tmp_path, tokenizer, ids)
    lm = sublayer.load(folder)
    prompts = ["T", "今天"]  # the second is longer, and so starts later
    later = len(tokenizer(prompts[1]).input_ids) - 1
    assert lm.generate(prompts, max_new_tokens=50) == [TEXT, tokenizer.decode(ids[later:])]
    pieces = check_pieces(lm, "T", len(ids) + 3)
    assert "".join(pieces) == TEXT
    assert 10 < len(pieces) < len(ids)


def test_pieces_of_bytes_are_whole_characters(tmp_path):
    """SentencePiece's way: a byte is a token of its own, and a run of them is read together."""
    names = ["</s>", "<unk>", "▁", "a", "▁the", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: number for number, name in enumerate(names)}
    out = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    out.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=out, eos_token="</s>", unk_token="<unk>")
    rows = [
        "▁the",
        *"\n🚀".encode(),
        "a",
        "▁the",
        *"\n中".encode(),
        *"\n🙂".encode()[:3],
        "a",
    ]  # the last one is broken
    ids = [vocab[row if isinstance(row, str) else f"<0x{row:02X}>"] for row in rows]
    lm = sublayer.load(reciter(tmp_path, tokenizer, ids))
    pieces = check_pieces(lm, "a", len(ids) + 2)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).startswith(" the\n🚀a the")


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: Any) -> Any:
    """It says TEXT, whatever it reads; a piece of it is often part of a character, or several of them."""
    tokenizer = byte_pairs()
    return sublayer.load(reciter(tmp_path_factory.mktemp("parrot"), tokenizer, tokenizer(TEXT).input_ids))


def stopped(text: str, stops: list[str]) -> str:
    """Read character by character, until what was read ends with a stop string."""
    for place in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:place].endswith(stop)]:
            return text[: place - max(map(len, ending))]
    return text


PARTS = st.builds(lambda start, size: TEXT[start : start + size], st.integers(0, len(TEXT) - 1), st.integers(1, 6))


@given(stops=st.lists(PARTS | st.text("今天is naïve🚀.", min_size=1, max_size=4), min_size=1, max_size=3))
def test_an_answer_ends_before_its_stop_strings(stops, parrot):
    expected = stopped(TEXT, stops)
    assert parrot.generate("T", max_new_tokens=50, stop=stops) == expected
    pieces = list(parrot.stream("T", max_new_tokens=50, stop=stops))
    assert "".join(pieces) == expected and all(pieces)
    detail = parrot.generate_details("T", max_new_tokens=50, stop=stops)[0]
    assert (detail.text, detail.finish_reason) == (expected, "stop")
    assert stopped(parrot.tokenizer.decode(detail.ids), stops) == expected


def test_rows_of_a_list_stop_apart(parrot):
    prompts = ["T", "今天"]  # the second begins later in the text
    whole = parrot.generate(prompts, max_new_tokens=50)
    for stop in ("is", "天", "🙂 n", "."):
        assert parrot.generate(prompts, max_new_tokens=50, stop=stop) == [stopped(text, [stop]) for text in whole]


def test_a_special_token_is_a_stop_string_too(tmp_path):
    tokenizer = byte_pairs()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    said = tokenizer("one<|turn|>two").input_ids
    lm = sublayer.load(reciter(tmp_path, tokenizer, said))
    assert lm.generate("T") == "onetwo"
    assert lm.generate("T", stop=["<|turn|>", "never"]) == "one" == "".join(lm.stream("T", stop="<|turn|>"))


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], 5])
def test_stop_strings_are_strings(stop, parrot):
    if stop == "":
        assert parrot.generate("T", max_new_tokens=50, stop=stop) == TEXT  # no stop string at all
    else:
        assert "stop" in refusal(lambda: parrot.generate("T", stop=stop))


@pytest.mark.parametrize("kind", GENERATORS)
def test_beams_are_those_of_transformers(kind, request):
    folder = request.getfixturevalue(kind)
    tokenizer, model, lm = AutoTokenizer.from_pretrained(folder), read(GENERATORS[kind], folder), sublayer.load(folder)
    for text in PROMPTS:
        inputs = tokenizer(text, return_tensors="pt").to(model.device)
        new = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, num_beams=3, do_sample=False,
            max_new_tokens=10,
        )  # fmt: skip
        expected = words(folder, [new[0, inputs.input_ids.size(1) if kind == "gpt2" else 1 :].tolist()])[0]
        assert lm.generate(text, num_beams=3, max_new_tokens=10) == expected
        assert list(lm.stream(text, num_beams=3, max_new_tokens=10)) == [expected]


@pytest.mark.parametrize("kind", GENERATORS)
def test_details_tell_what_the_model_thought(kind, request):
    folder = request.getfixturevalue(kind)
    tokenizer, model, lm = AutoTokenizer.from_pretrained(folder), read(GENERATORS[kind], folder), sublayer.load(folder)
    rows = their_answers(folder, kind, PROMPTS, 9)
    found = lm.generate_details(PROMPTS, max_new_tokens=9, top=3)
    for text, row, detail in zip(PROMPTS, rows, found, strict=True):
        assert detail.ids == row and detail.text == words(folder, [row])[0]
        assert detail.finish_reason == ("stop" if row[-1] in lm.eos_id else "length")
        ids, new = tokenizer(text, return_tensors="pt").input_ids.to(model.device), torch.tensor([row])
        with torch.no_grad():
            if kind == "gpt2":
                logits = model(torch.cat([ids, new], 1)).logits[0, ids.size(1) - 1 : -1]
            else:
                logits = model(ids, decoder_input_ids=torch.cat([new.new_zeros(1, 1), new[:, :-1]], 1)).logits[0]
        best = logits.log_softmax(-1).topk(3)
        assert [[token for token, _ in place] for place in detail.top] == best.indices.tolist()
        assert [[p for _, p in place] for place in detail.top] == [
            pytest.approx(p, abs=1e-4) for p in best.values.tolist()
        ]
        assert detail.logprobs == pytest.approx([place[0][1] for place in detail.top])  # greedy: the best was taken
    sampled = lm.generate_details(PROMPTS[0], max_new_tokens=9, temperature=1.5, seed=1)[0]
    assert len(sampled.logprobs) == len(sampled.ids) and not sampled.top and max(sampled.logprobs) <= 0
    assert lm.generate_details(PROMPTS[0], max_new_tokens=9, top=None)[0].logprobs == []
    assert "top is" in refusal(lambda: lm.generate_details("a", top=9999))


def test_an_answer_is_as_long_as_there_is_room_for(gpt2):
    lm = sublayer.load(gpt2)
    prompt = "a" * 90
    detail = lm.generate_details(prompt, eos_id=299)[0]
    assert len(lm.tokenizer.encode(prompt)) + len(detail.ids) == lm.config.max_positions
    assert "positions" in refusal(lambda: lm.generate(prompt, max_new_tokens=50))


def test_why_an_answer_ended(parrot):
    length = len(parrot.tokenizer.encode(TEXT))
    reasons = [parrot.generate_details("T", max_new_tokens=n)[0].finish_reason for n in (1, length, length + 1)]
    assert reasons == ["length", "length", "stop"]


def sentence_vectors(folder: Path, texts: list[str], pooling: str = "mean") -> torch.Tensor:
    """One at a time, so that there is no padding to get wrong."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), read("BertModel", folder)
    rows = []
    for text in texts:
        with torch.no_grad():
            states = model(tokenizer(text, return_tensors="pt").input_ids.to(model.device)).last_hidden_state[0]
        rows.append(states[0] if pooling == "cls" else states.mean(0))
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


def test_embed(bert_model):
    lm = sublayer.load(bert_model)
    expected = sentence_vectors(bert_model, SENTENCES)
    torch.testing.assert_close(lm.embed(SENTENCES), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lm.embed(SENTENCES[1]), expected[1:2], atol=1e-5, rtol=1e-5)


def test_embed_with_the_body_of_another_head(masked):
    expected = sentence_vectors(masked, SENTENCES)
    torch.testing.assert_close(sublayer.load(masked).embed(SENTENCES), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_embed_pools_as_the_folder_says_and_after_it_was_saved(settings, pooling, bert_model, tmp_path):
    folder = Path(shutil.copytree(bert_model, tmp_path / "copy"))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24} | settings))
    expected = sentence_vectors(folder, SENTENCES, pooling)
    lm = sublayer.load(folder)
    lm.save(tmp_path / "again")
    for one in (lm, sublayer.load(tmp_path / "again")):
        torch.testing.assert_close(one.embed(SENTENCES), expected, atol=1e-5, rtol=1e-5)


def test_embed_refuses_what_it_would_get_wrong(bert_model, tmp_path):
    folder = Path(shutil.copytree(bert_model, tmp_path / "copy"))
    (folder / "1_Pooling").mkdir()
    settings = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    assert "max_tokens" in refusal(lambda: sublayer.load(folder).embed("dog"))
    shutil.rmtree(folder / "1_Pooling")
    (folder / "2_Dense").mkdir()
    assert "dense" in refusal(lambda: sublayer.load(folder).embed("dog"))


def test_fill(masked):
    lm = sublayer.load(masked)
    tokenizer, theirs = AutoTokenizer.from_pretrained(masked), read("BertForMaskedLM", masked)
    for text in ("[MASK]", "Paris is the [MASK] of France.", "the quick 今天 fox [MASK]"):
        ids = tokenizer(text, return_tensors="pt").input_ids.to(theirs.device)
        with torch.no_grad():
            scores = theirs(ids).logits[ids == tokenizer.mask_token_id][0].softmax(-1)
        best = scores.topk(len(tokenizer))
        for top in (1, 5, len(tokenizer)):
            found = lm.fill(text, top=top)
            assert [name for name, _ in found] == [tokenizer.decode([i]) for i in best.indices[:top].tolist()]
            assert [p for _, p in found] == pytest.approx(best.values[:top].tolist(), abs=1e-6)
        assert sum(p for _, p in found) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        (None, ["bad", "good"]),
        ("single_label_classification", ["negative", "neutral", "positive"]),
        ("multi_label_classification", ["rude", "long", "wrong"]),
        (None, ["toxic"]),
    ],
)
def test_classify(problem, names, tmp_path):
    labels = dict(id2label=dict(enumerate(names)), label2id={name: n for n, name in enumerate(names)})
    folder = bert(tmp_path, "BertForSequenceClassification", problem_type=problem, **labels)
    pipeline = transformers.pipeline("text-classification", str(folder), top_k=None, device=torch.get_default_device())
    lm = sublayer.load(folder)
    found = lm.classify(SENTENCES)
    for text, row in zip(SENTENCES, found, strict=True):
        assert list(row) == names
        assert row == pytest.approx({entry["label"]: entry["score"] for entry in pipeline([text])[0]}, abs=1e-6)
        assert lm.classify(text) == pytest.approx(row, abs=1e-6)


def test_refusals_of_texts(gpt2, masked, bert_model, t5):
    decoder, filler = sublayer.load(gpt2), sublayer.load(masked)
    assert "encoder" in refusal(lambda: decoder.embed("a"))
    assert "encoder" in refusal(lambda: sublayer.load(t5).embed("a"))
    assert "'mlm'" in refusal(lambda: decoder.fill("a"))
    assert "'classifier'" in refusal(lambda: filler.classify("a"))
    assert "'lm'" in refusal(lambda: filler.generate("a"))
    assert "'mlm'" in refusal(lambda: sublayer.load(bert_model).fill("[MASK]"))
    assert "found 0" in refusal(lambda: filler.fill("no mask at all"))
    assert "found 2" in refusal(lambda: filler.fill("[MASK] and [MASK]"))
    assert "top is 0" in refusal(lambda: filler.fill("[MASK]", top=0))
    assert "top is 9999" in refusal(lambda: filler.fill("[MASK]", top=9999))
    for nothing in ("", [], ["a", ""]):
        assert "nothing to read" in refusal(lambda nothing=nothing: decoder.generate(nothing))
    assert "nothing to read" in refusal(lambda: list(decoder.stream("")))
    assert refusal(lambda: filler.embed("the " * 100))  # more than the positions of the model
    assert refusal(lambda: decoder.generate("a", max_new_tokens=0))


def test_fill_needs_a_tokenizer_with_a_mask(masked, tmp_path):
    folder = Path(shutil.copytree(masked, tmp_path / "copy"))
    byte_pairs().save_pretrained(folder)
    config = transformers.BertConfig(vocab_size=300, **BERT_SIZES)
    assert "mask token" in refusal(
        lambda: sublayer.load(write(folder, "BertForMaskedLM", config, byte_pairs())).fill("a")
    )


def test_refusals_of_folders(gpt2, tmp_path):
    folder = Path(shutil.copytree(gpt2, tmp_path / "copy"))
    tokenizer = byte_pairs()
    tokenizer.add_tokens(["one", "more"])
    tokenizer.save_pretrained(folder)
    message = refusal(lambda: sublayer.load(folder))
    assert str(len(tokenizer)) in message and "300" in message
    whole = (gpt2 / "tokenizer.json").read_bytes()
    for broken in (b"", b"{}", b"{", b"[]", b"\xff\xfe", whole[: len(whole) // 2], b'{"model": {"type": "BPE"}}'):
        (folder / "tokenizer.json").write_bytes(broken)
        assert str(folder) in refusal(lambda: sublayer.load(folder))
    (folder / "tokenizer.json").write_bytes(whole)
    (folder / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json" in refusal(lambda: sublayer.load(folder))
    for file in folder.glob("*token*"):
        file.unlink()
    assert "holds no tokenizer" in refusal(lambda: sublayer.load(folder))


AUTO = {"bert_model": "AutoModel", "masked": "AutoModelForMaskedLM"}
AUTO |= {"gpt2": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM"}


@pytest.mark.parametrize("kind", AUTO)
def test_save(kind, request, tmp_path, monkeypatch):
    first, second = request.getfixturevalue(kind), tmp_path / "second"
    lm = sublayer.load(first)
    lm.save(second)
    monkeypatch.chdir(tmp_path)
    sublayer.load("second").save(second)  # onto itself, under another name
    before, after = AutoTokenizer.from_pretrained(first), AutoTokenizer.from_pretrained(second)
    assert before.special_tokens_map == after.special_tokens_map
    theirs, again = read(AUTO[kind], first), read(AUTO[kind], second)
    for text in [*SENTENCES, *CORPUS]:
        ids = after(text, return_tensors="pt").input_ids.to(theirs.device)
        assert ids.tolist() == [before(text).input_ids] == [lm.tokenizer.encode(text)]
        assert after.decode(ids[0]) == before.decode(ids[0])
        inputs = dict(input_ids=ids) | (dict(decoder_input_ids=ids) if kind == "t5" else {})
        with torch.no_grad():
            expected, found = theirs(**inputs), again(**inputs)
            ours = lm.model(ids, ids) if kind == "t5" else lm.model(ids)
        torch.testing.assert_close(found[0], expected[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ours, expected[0], atol=1e-4, rtol=1e-4)


OLDER = {
    "gpt2": (["<|endoftext|>"], transformers.GPT2Config, {}),
    "roberta": (["<s>", "<pad>", "</s>", "<unk>", "<mask>"], transformers.RobertaConfig, {}),
    "prefixed": (["<s>", "<pad>", "</s>", "<unk>", "<mask>"], transformers.RobertaConfig, {"add_prefix_space": True}),
    "bert": (list(BERT_SPECIAL.values()), transformers.BertConfig, {}),
    "cased": (list(BERT_SPECIAL.values()), transformers.BertConfig, {"do_lower_case": False}),
    "accents": (list(BERT_SPECIAL.values()), transformers.BertConfig, {"strip_accents": False}),
    "chinese": (list(BERT_SPECIAL.values()), transformers.BertConfig, {"tokenize_chinese_chars": False}),
}


@pytest.mark.parametrize("kind", OLDER)
def test_older_vocabulary_files(kind, tmp_path):
    special, config, settings = OLDER[kind]
    pieces = config is transformers.BertConfig
    trained = tokenizers.BertWordPieceTokenizer() if pieces else tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=330, special_tokens=special, show_progress=False)
    trained.save_model(str(tmp_path))
    config().save_pretrained(tmp_path)
    if settings:
        name = config.__name__.replace("Config", "Tokenizer")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    for text in [*CORPUS, *SENTENCES, f"a {special[-1]} b", f"{special[0]}Naïve"]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        if not pieces:  # their decoder of word pieces leaves the spaces before a comma
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special("mask") == (None if kind == "gpt2" else theirs.mask_token_id)
