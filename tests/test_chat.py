"""Chat templates: the text that transformers makes of the same conversation, and limits that a template cannot pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import sublayer
from sublayer.data import chat
from sublayer.hub.tokenizer import gguf_settings
from test_lm import byte_pairs, gpt2_config, read, refusal, write

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + strftime_now("%d %b %Y") + "\\n\\n" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
BLOCKS = """
{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ ns.count }} {{ message | tojson }} <b>{{ message.content }}</b>
        {% endgeneration %}
    {% else %}
{{ message.content.split(' ')[0] | upper }}{{ unk_token }}{{ never_given }}
    {% endif %}
{% endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "blocks": BLOCKS}
TALKS = {
    "one": [("user", "Hi there")],
    "several": [("user", "  What is 2 < 3?\n"), ("assistant", 'It\'s "true" & 今天 🚀'), ("user", "Why {{ 7*7 }}?")],
    "system": [("system", " Be brief.\n"), ("user", "a"), ("assistant", "b"), ("user", "c")],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The <weather>", "parameters": {}}}]


def talk(name: str) -> list[dict[str, str]]:
    return [dict(role=role, content=content) for role, content in TALKS[name]]


def ours(template: str, messages: Any, **more: Any) -> str:
    values = dict(special={"bos_token": "<|end|>", "eos_token": "<|end|>"}, add_generation_prompt=True) | more
    return chat.render(template, messages, **values)


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("name", TALKS)
def test_equal_to_transformers(kind, name):
    tokenizer = byte_pairs()
    if kind == "mistral" and name == "system":
        with pytest.raises(Exception, match="roles must alternate"):
            tokenizer.apply_chat_template(talk(name), chat_template=MISTRAL, tokenize=False)
        assert "roles must alternate" in refusal(lambda: ours(MISTRAL, talk(name)))
        return
    for prompt, tools in ((True, None), (False, TOOLS)):
        expected = tokenizer.apply_chat_template(
            talk(name), tools, chat_template=TEMPLATES[kind], add_generation_prompt=prompt, tokenize=False
        )
        assert ours(TEMPLATES[kind], talk(name), tools=tools, add_generation_prompt=prompt) == expected


def test_a_message_may_call_tools_instead_of_saying_something():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Ulm"}}}]}
    template = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{% endfor %}"
    expected = byte_pairs().apply_chat_template([call], chat_template=template, tokenize=False)
    assert ours(template, [call]) == expected


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one"),
        ("hello", "list"),
        ([{"role": "user", "content": "a"}, "b"], "message 2"),
        ([{"content": "a"}], "role"),
        ([{"role": 1, "content": "a"}], "role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": ["a"]}], "list"),
        ([{"role": "user", "content": "a", "more": {1, 2}}], "JSON"),
    ],
)
def test_wrong_messages(messages, said):
    assert said in refusal(lambda: ours(CHATML, messages))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(10**9) %}a{% endfor %}", "too big"),
        ("{% if", "line 1"),
        ("\n{% nonsense %}", "line 2"),
        ("{{ never.given.at_all }}", "undefined"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{{ raise_exception('two\nlines') }}", "refuses the messages: two lines"),
        ("{{ 'a'.ljust(5000000) }}", "more than 4 MB"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 4 MB"),
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (" " * (300 << 10), "256 KB"),
    ],
)
def test_what_a_template_may_not_do(template, said):
    assert said in refusal(lambda: ours(template, talk("one")))


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 99999999 ** 99999999 }}",  # one instruction, which no check between instructions would stop
    ],
)
def test_a_template_without_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.7)
    assert "0.7 seconds" in refusal(lambda: ours(template, talk("one")))


def test_jinja_is_an_extra_and_must_be_new_enough(monkeypatch):
    def absent(name: str) -> str:
        raise chat.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(chat.importlib.metadata, "version", absent)
    assert "sublayer[chat]" in refusal(lambda: ours(CHATML, talk("one")))
    monkeypatch.setattr(chat.importlib.metadata, "version", lambda name: "3.1.5")
    assert "3.1.6" in refusal(lambda: ours(CHATML, talk("one")))


# A model that holds conversations


@pytest.fixture(scope="module")
def talker(tmp_path_factory: Any) -> Path:
    tokenizer = byte_pairs()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    config = gpt2_config(tokenizer, n_positions=400)
    return write(tmp_path_factory.mktemp("talker"), "GPT2LMHeadModel", config, tokenizer)


def place(folder: Path, how: str, target: Path) -> Path:
    """The same model, its template kept in another of the places where checkpoints have it."""
    shutil.copytree(folder, target)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    if how == "file":
        (target / "chat_template.jinja").write_text(CHATML)
        settings["chat_template"] = "the older place"
    elif how == "settings":
        settings["chat_template"] = CHATML
    elif how == "named":
        named = {"default": CHATML, "tool_use": "tools"}
        settings["chat_template"] = [dict(name=name, template=text) for name, text in named.items()]
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


@pytest.mark.parametrize("how", ["file", "settings", "named"])
def test_an_answer_is_that_of_transformers_wherever_the_template_is(how, talker, tmp_path):
    lm = sublayer.load(place(talker, how, tmp_path / "copy"))
    tokenizer, model = AutoTokenizer.from_pretrained(talker), read("GPT2LMHeadModel", talker)
    inputs = tokenizer.apply_chat_template(
        talk("system"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    new = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs.input_ids.size(1) :]
    expected = tokenizer.decode(new, skip_special_tokens=True)
    assert lm.chat(talk("system"), max_new_tokens=12) == expected
    assert "".join(lm.stream_chat(talk("system"), max_new_tokens=12)) == expected
    assert lm.chat_details(talk("system"), max_new_tokens=12).ids == new.tolist()
    if how == "named":
        assert lm.chat_prompt(talk("one"), tools=TOOLS) == "tools"
    lm.save(tmp_path / "again")
    assert sublayer.load(tmp_path / "again").chat_prompt(talk("one")) == lm.chat_prompt(talk("one"))


def test_no_template(talker, tmp_path):
    lm = sublayer.load(place(talker, "nowhere", tmp_path / "copy"))
    assert "chat template" in refusal(lambda: lm.chat(talk("one")))
    (tmp_path / "copy" / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refusal(lambda: lm.chat(talk("one")))


def test_what_a_template_needs_of_a_gguf_file():
    metadata = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 9,  # there is no such token
        "tokenizer.chat_template": CHATML,
    }
    assert gguf_settings(metadata) == {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
