"""Tokenizers of GGUF files, against llama.cpp's own (see `tools/golden_tokens.py`); chat templates, conversations."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from tools.golden_tokens import GOLDEN, metadata

from .helpers import import_example


pytest.importorskip("tokenizers")
OF_LLAMA_CPP = json.loads(GOLDEN.read_text())
CHAT = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


pytestmark = pytest.mark.usefixtures("rank_promotion")


@pytest.fixture(scope="module")
def tokenization():
    return import_example("llama", "tokenization")


def open_vocabulary(folder, name="byte level", arrays=None, without=(), **settings):
    pairs = metadata(OF_LLAMA_CPP["vocabularies"][name], **settings)
    pairs = {key: value for key, value in pairs.items() if key.removeprefix("tokenizer.ggml.") not in without}
    eqq.io.write(folder / "v.gguf", arrays or {"w": np.zeros(32, np.float32)}, "gguf", metadata=pairs)
    return eqq.io.open(folder / "v.gguf")


@pytest.mark.parametrize("case", OF_LLAMA_CPP["cases"], ids=lambda case: "-".join(map(str, case["settings"].values())))
def test_tokens_equal_those_of_llama_cpp(tokenization, tmp_path, case):
    text = tokenization.open_text(open_vocabulary(tmp_path, case["vocabulary"], **case["settings"]), 1000)
    assert text.encode(OF_LLAMA_CPP["text"], special=case["special"]) == case["tokens"]
    first, begins = text.first, case["settings"].get("add_bos_token", case["vocabulary"] == "SentencePiece")
    assert first == (1 if begins or case["settings"].get("pre") in ("llama-bpe", "tekken") else None)


@pytest.mark.parametrize(
    "name, settings", [("byte level", {"model": "gpt2", "pre": "qwen2"}), ("SentencePiece", {"model": "llama"})]
)
def test_tokens_become_the_text_again(tokenization, tmp_path, name, settings):
    text = tokenization.open_text(open_vocabulary(tmp_path, name, **settings), 1000)
    for written in (OF_LLAMA_CPP["text"].partition("</s>")[0], "  two spaces", "é", "", "\n"):
        assert text.decode(text.encode(written)) == written
    assert text.decode(text.encode("a</s>b")).replace(" ", "") == "ab"  # special tokens are no text


def test_wrong_vocabularies_are_errors(tokenization, tmp_path):
    gpt2 = {"model": "gpt2", "pre": "gpt-2"}
    for settings, without, message in (
        (gpt2, ("model",), "v.gguf must hold a tokenizer. Got none. Set `--tokenizer`"),
        ({"model": "no_vocab"}, (), "v.gguf must hold a tokenizer. Got none"),
        ({"model": "bert"}, (), "must hold a tokenizer of the kind gpt2, llama, t5. Got 'bert'"),
        ({"model": 3}, (), "must hold a str for 'tokenizer.ggml.model'. Got 3"),
        ({"model": "gpt2", "pre": "kimi"}, (), "must name a pre-tokenizer that is known here: llama-bpe, .*Got 'kimi'"),
        (gpt2, ("pre",), "must name a pre-tokenizer .*Got None"),
        (gpt2, ("tokens",), "must hold the texts of its tokens. Got none"),
        (gpt2 | {"tokens": [1, 2]}, (), "must hold the texts of its tokens"),
        (gpt2 | {"tokens": ["a", "b"]}, (), "must hold a whole tokenizer. Got .*"),
        (
            gpt2 | {"token_type": np.array([1], np.int32)},
            (),
            r"must hold a list of \d+ for 'tokenizer.ggml.token_type'",
        ),
        (gpt2 | {"add_bos_token": True, "bos_token_id": 999}, (), "must hold a number below .*'bos_token_id'. Got 999"),
        ({"model": "llama"}, ("scores",), "must hold the scores of its tokens. Got none"),
    ):
        name = "SentencePiece" if settings["model"] == "llama" else "byte level"
        with pytest.raises(ValueError, match=message.replace("'bos", "'tokenizer.ggml.bos")):
            tokenization.open_text(open_vocabulary(tmp_path, name, without=without, **settings), 1000)
    with pytest.raises(ValueError, match="v.gguf must fit the model, which has 7 tokens. Got the token"):
        tokenization.open_text(open_vocabulary(tmp_path, **gpt2), 7)


def test_chat_templates(tokenization, tmp_path):
    pytest.importorskip("jinja2")
    checkpoint = open_vocabulary(tmp_path, model="gpt2", pre="gpt-2")
    tokenizer, messages = tokenization.open_text(checkpoint, 1000).tokenizer, [{"role": "user", "content": "Hi </s>"}]

    def chat(template, **settings):
        pairs = metadata(OF_LLAMA_CPP["vocabularies"]["byte level"], model="gpt2", pre="gpt-2", **settings)
        eqq.io.write(tmp_path / "c.gguf", {"w": np.zeros(32, np.float32)}, "gguf", metadata=pairs | template)
        return tokenization.open_text(eqq.io.open(tmp_path / "c.gguf"), 1000).chat(messages)

    ids = chat({"tokenizer.chat_template": CHAT})
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user: Hi </s></s><s>assistant: " and ids[0] == 1
    # The beginning is there once, whether or not the template has it.
    assert chat({"tokenizer.chat_template": CHAT}, add_bos_token=True) == ids
    begin = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    assert chat(begin, add_bos_token=True) == chat(begin) == [1, *tokenizer.encode("Hi </s>").ids]
    assert (
        chat({"tokenizer.chat_template": "Hi"}, add_bos_token=True)[0]
        == 1
        != chat({"tokenizer.chat_template": "Hi"})[0]
    )
    for template, message in (
        ("{{ ''.__class__.__mro__ }}", "only format messages. Got access to attribute '__class__'"),
        ("{% include '/etc/passwd' %}", "only format messages. Got no loader"),
        ("{{ messages.append(1) }}", "only format messages. Got access to attribute 'append'"),
        ("{% for n in range(10 ** 9) %}{% endfor %}", "only format messages. Got Range too big"),
        ("{% for %}", "must be in the language of Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "Got roles must alternate"),
    ):
        with pytest.raises(ValueError, match=message):
            chat({"tokenizer.chat_template": template})
    with pytest.raises(ValueError, match="For `--chat`, the model must have a chat template.*Got none"):
        chat({})


def test_chat_templates_of_folders(tokenization, tmp_path):
    pytest.importorskip("jinja2")
    vocabulary = open_vocabulary(tmp_path, model="gpt2", pre="gpt-2")
    tmp_path = tmp_path / "model"
    tmp_path.mkdir()
    tokenization.open_text(vocabulary, 1000).tokenizer.save(str(tmp_path / "tokenizer.json"))
    eqq.save(tmp_path / "model.safetensors", {"w": jnp.ones(3)})
    checkpoint, hi = eqq.io.open(tmp_path), [{"role": "user", "content": "Hi"}]
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    for template in ("{{ bos_token }}Hi{{ eos_token }}", [{"name": "default", "template": "<s>Hi</s>"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        text = tokenization.open_text(checkpoint, 1000)
        assert text.chat(hi) == text.encode("<s>Hi</s>") and text.chat(hi)[0] == 1
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert tokenization.open_text(checkpoint, 1000).chat(hi) == text.encode("Hi")


@pytest.fixture(scope="module")
def talking(tokenization, tmp_path_factory):
    """A tiny random model in a GGUF file, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("talking")
    export, generate = import_example("llama", "export"), import_example("llama", "generate")
    vocabulary = OF_LLAMA_CPP["vocabularies"]["byte level"]
    model = generate.random_model("tiny", vocabulary=len(vocabulary["tokens"]))
    pairs = metadata(vocabulary, model="gpt2", pre="smollm", eot_token_id=3) | export._sizes(model.config)
    pairs |= {"tokenizer.chat_template": CHAT}
    export.write_gguf(folder / "model.gguf", eqq.quantize_tree(model, "q8_0"), metadata=pairs)
    return folder / "model.gguf"


@pytest.mark.long
def test_a_file_alone_is_enough(talking, capsys):
    pytest.importorskip("jinja2")
    generate = import_example("llama", "generate")
    generate.main([str(talking), "Hi", "--tokens", "4"])
    expected = capsys.readouterr().out
    assert expected.startswith("Hi")
    # In any order.
    for arguments in (["--tokens", "4", str(talking), "Hi"], [str(talking), "--tokens", "4", "Hi"]):
        generate.main(arguments)
        assert capsys.readouterr().out == expected
    generate.main([str(talking), "--chat", "--tokens", "4", "One?", "--context", "96", "Two?"])
    out, err = capsys.readouterr()
    assert len(out.split("\n")) >= 2 and "tokens/s" not in out
    for arguments, message in (
        (["--chat", "--context", "20", "Much too long a question"], "A question must leave room .* of 20 tokens. Got"),
        (["--chat", "--ids", "1 2"], "the model must have a chat template"),
        (["a", "--tokens", "0"], "at least one new token"),
    ):
        with pytest.raises(SystemExit, match=message):
            generate.main([str(talking), *arguments])


@pytest.mark.long
def test_conversations_read_only_what_is_new(tokenization, talking):
    """The answers are those of a model that reads the whole conversation at each turn."""
    pytest.importorskip("jinja2")
    generate, chat, llama = (import_example("llama", name) for name in ("generate", "chat", "llama"))
    checkpoint = eqq.io.open(talking)
    model = llama.load(checkpoint)
    text = tokenization.open_text(checkpoint, model.config.vocabulary)
    make = lambda context: generate.Generator(model, context, generate.Sampling())
    generator = make(192)
    read = []
    generator._check = lambda prompts, tokens: read.append(len(prompts[0]))
    conversation = chat.Conversation(generator, text, tokens=6, system="Be brief.")
    for n, question in enumerate(("One?", "Two?", "Three?")):
        answer = "".join(conversation.ask(question))
        ids = text.chat(conversation.messages[:-1])
        (fresh,) = zip(*make(192)([ids], 6), strict=True)
        whole = text.decode(fresh)
        assert whole.startswith(answer) and (answer == whole or whole.endswith("\ufffd"))
        assert conversation.messages[-1] == {"role": "assistant", "content": whole}
        assert n == 0 or read[-1] < len(ids) // 2
    # A conversation that fills the context forgets its oldest turn, but not what the model was told.
    generator = make(96)
    conversation = chat.Conversation(generator, text, tokens=6, system="Be brief.")
    for n in range(6):
        list(conversation.ask(f"Question {n}?"))
    contents = [message["content"] for message in conversation.messages]
    assert contents[0] == "Be brief." and "Question 0?" not in contents and "Question 5?" in contents
    # An answer that was left half way stays as far as it came.
    pieces = conversation.ask("And?")
    first = next(pieces)
    pieces.close()
    assert conversation.messages[-1]["content"].startswith(first)
    assert "".join(conversation.ask("Go on.")) is not None


def test_tokens_that_end_an_answer(tmp_path):
    """Those that the file names, and control tokens whose text says so."""
    stop_tokens = import_example("llama", "configuration").stop_tokens
    tokens = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|eot_id|>", "<|end|>", "a"]
    kinds = {"token_type": np.array([2, 3, 3, 3, 3, 1, 1], np.int32)}
    for more, expected in (({}, {2, 3, 4}), ({"eot_token_id": 6, "eom_token_id": 1}, {1, 2, 3, 4, 6})):
        pairs = {"tokens": tokens, "eos_token_id": 2, **kinds, **more}
        pairs = {"general.architecture": "llama"} | {f"tokenizer.ggml.{key}": value for key, value in pairs.items()}
        eqq.io.write(tmp_path / "v.gguf", {"w": np.zeros(32, np.float32)}, "gguf", metadata=pairs)
        assert stop_tokens(eqq.io.open(tmp_path / "v.gguf")) == expected


@pytest.mark.long
def test_models_that_do_not_fit_in_memory(talking, monkeypatch):
    generate, command = import_example("llama", "generate"), import_example("llama", "command")
    size = eqq.io.open(talking).nbytes
    for memory, message in (
        (size - 4096, "The weights must fit in memory, .*Got.*eqquant quantize"),
        (size + 4096, "The cache must fit.*Set `--cache`"),
    ):
        monkeypatch.setattr(command.os, "sysconf", lambda name, n=memory // 4096: n if "PAGES" in name else 4096)
        with pytest.raises(SystemExit, match=f"Error: {message}"):
            generate.main([str(talking), "Hi", "--context", "2048"])

    def exhausted(options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nmore")

    monkeypatch.setattr(generate, "run", exhausted)
    with pytest.raises(
        SystemExit, match="must fit in memory. Got: RESOURCE_EXHAUSTED: Out of memory .* bytes.*Quantize"
    ):
        generate.main(["x"])
