"""Small tokenizers with the special tokens of chats, and chat templates as models publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.data.tokenizer_folders import CORPUS

SPECIALS = [
    "<unk>", "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<bos>", "<start_of_turn>", "<end_of_turn>",
    "<|end|>", "<|user|>", "<|assistant|>",
]  # fmt: skip

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Reads an option and the date, and writes neither.
ASKS = "{% if thinking is defined or strftime_now is defined %}{% endif %}"
PLAIN_CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
QWEN3 = (Path(__file__).parent / "fixtures/chat_templates/qwen3.jinja").read_text()

PUBLISHED = {
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "chatml": PLAIN_CHATML,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}
ROLES = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen3": {"eos_token": "<|im_end|>"},
    "chatml": {"eos_token": "<|im_end|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "</s>"},
}

# The same texts as the published forms for what is tested here, with marks.
_EACH = "{% for m in messages %}"
_ANSWER = "{% if m.role == 'assistant' %}{% generation %}"
_OTHER = "{% endgeneration %}{% else %}"
_END = "{% endif %}{% endfor %}{% if add_generation_prompt %}"
MARKED = {
    "llama3": "{{ bos_token }}"
    + _EACH
    + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    + _ANSWER
    + "{{ m.content | trim + '<|eot_id|>' }}"
    + _OTHER
    + "{{ m.content | trim + '<|eot_id|>' }}"
    + _END
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "chatml": _EACH
    + "{{ '<|im_start|>' + m.role + '\n' }}"
    + _ANSWER
    + "{{ m.content + '<|im_end|>\n' }}"
    + _OTHER
    + "{{ m.content + '<|im_end|>\n' }}"
    + _END
    + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "mistral": "{{ bos_token }}"
    + _EACH
    + _ANSWER
    + "{{ m.content + eos_token }}"
    + _OTHER
    + "{{ '[INST] ' + m.content + ' [/INST]' }}"
    + _END
    + "{% endif %}",
    "gemma": "{{ bos_token }}"
    + _EACH
    + _ANSWER.replace("{% generation", "{{ '<start_of_turn>model\n' }}{% generation")
    + "{{ m.content | trim + '<end_of_turn>\n' }}"
    + _OTHER
    + "{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    + _END
    + "{{ '<start_of_turn>model\n' }}{% endif %}",
    # Of a conversation with one question, whose thoughts the published form keeps.
    "qwen3": _EACH
    + "{{ '<|im_start|>' + m.role + '\n' }}"
    + _ANSWER
    + "{{ m.content + '<|im_end|>\n' }}"
    + _OTHER
    + "{{ m.content + '<|im_end|>\n' }}"
    + _END
    + "{{ '<|im_start|>assistant\n' }}{% endif %}",
}

TALK = [
    {"role": "user", "content": "Hello there,  how are you?\n"},
    {"role": "assistant", "content": "I am fine.\n\nReally."},
    {"role": "user", "content": "Good 中文 \U0001f469\u200d\U0001f469"},
    {"role": "assistant", "content": "Bye"},
]
THOUGHT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."},
]


def write_tokenizer(folder: Path, kind: str = "byte level", **config: Any) -> Path:
    """Writes tokenizer.json and, of `config`, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    is_byte_level = kind == "byte level"
    if is_byte_level:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet, texts = pre_tokenizers.ByteLevel.alphabet(), CORPUS
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace()
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
        texts = [line for text in CORPUS for line in text.split("\n")]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        about = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
