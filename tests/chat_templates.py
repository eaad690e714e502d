"""Chat templates of the most used model families, written after their documented formats.

Each is as short as the format allows: roles and their markers, what ends a turn, what begins an answer. Where
a family writes earlier turns otherwise than the last, or trims what is said, the template does so too.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Family:
    """``markers``: special tokens. ``eos``: the tokenizer's. ``ends``: others at which `generate` stops."""

    template: str
    markers: tuple[str, ...] = ()
    eos: str = "</s>"
    ends: tuple[str, ...] = ()


def _turns(turn: str, prompt: str, before: str = "") -> str:
    """A template that writes one turn after the other; ``turn`` may use `role` and `said`."""
    return (
        before
        + "{% for m in messages %}{% set role = m['role'] %}{% set said = m['content'] %}"
        + turn
        + "{% endfor %}{% if add_generation_prompt %}"
        + prompt
        + "{% endif %}"
    )


_CHATML = ("<|im_start|>", "<|im_end|>")
_BY_ROLE = "{{% if role == 'assistant' %}}{}{{% else %}}{}{{% endif %}}"

FAMILIES = {
    # Qwen2, Qwen2.5, Yi, SmolLM2, Hermes
    "chatml": Family(
        _turns(
            "<|im_start|>{{ role }}\n{{ said }}<|im_end|>{{ '\n' }}",
            "<|im_start|>assistant\n",
        ),
        _CHATML,
        "<|im_end|>",
    ),
    # A base model's tokenizer whose end of text is not what ends a turn.
    "chatml-base": Family(
        _turns("<|im_start|>{{ role }}\n{{ said }}<|im_end|>{{ '\n' }}", "<|im_start|>assistant\n"),
        (*_CHATML, "<|endoftext|>"),
        "<|endoftext|>",
    ),
    # Only the last answer keeps a thought, which may be empty.
    "qwen3": Family(
        _turns(
            "<|im_start|>{{ role }}\n"
            "{% if role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
            "{{ said }}<|im_end|>{{ '\n' }}",
            "<|im_start|>assistant\n",
        ),
        _CHATML,
        "<|im_end|>",
    ),
    # The prompt opens a thought, which the conversation drops.
    "deepseek-r1": Family(
        _turns(
            _BY_ROLE.format("<|Assistant|>{{ said }}<|end_of_sentence|>", "<|User|>{{ said }}"),
            "<|Assistant|><think>\n",
            "<|begin_of_sentence|>",
        ),
        ("<|User|>", "<|Assistant|>", "<|begin_of_sentence|>", "<|end_of_sentence|>"),
        "<|end_of_sentence|>",
    ),
    "deepseek-v2": Family(
        _turns(
            _BY_ROLE.format("Assistant: {{ said }}{{ eos_token }}", "User: {{ said }}\n\n"),
            "Assistant:",
            "{{ bos_token }}",
        )
    ),
    "llama-2": Family(
        _turns(
            _BY_ROLE.format(
                " {{ said | trim }} {{ eos_token }}", "{{ bos_token }}[INST] {{ said | trim }} [/INST]"
            ),
            "",
        )
    ),
    "llama-3": Family(
        _turns(
            "<|start_header_id|>{{ role }}<|end_header_id|>\n\n{{ said | trim }}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|begin_of_text|>",
        ),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        "<|end_of_text|>",
        ("<|eot_id|>",),
    ),
    "mistral": Family(
        _turns(
            _BY_ROLE.format(" {{ said }}{{ eos_token }}", "[INST] {{ said }}[/INST]"), "", "{{ bos_token }}"
        ),
        ("[INST]", "[/INST]"),
    ),
    "gemma": Family(
        _turns(
            "<start_of_turn>{{ 'model' if role == 'assistant' else role }}\n{{ said | trim }}<end_of_turn>\n",
            "<start_of_turn>model\n",
            "{{ bos_token }}",
        ),
        ("<start_of_turn>", "<end_of_turn>"),
        ends=("<end_of_turn>",),
    ),
    "phi-3": Family(
        _turns("<|{{ role }}|>\n{{ said }}<|end|>\n", "<|assistant|>\n"),
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
        "<|endoftext|>",
        ("<|end|>",),
    ),
    "phi-4": Family(
        _turns("<|im_start|>{{ role }}<|im_sep|>{{ said }}<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        (*_CHATML, "<|im_sep|>"),
        "<|im_end|>",
    ),
    # The next turn's marker is what ends an answer.
    "glm-4": Family(
        _turns("<|{{ role }}|>\n{{ said }}", "<|assistant|>\n", "[gMASK]<sop>"),
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"),
        "<|endoftext|>",
        ("<|user|>",),
    ),
    "zephyr": Family(_turns("<|{{ role }}|>\n{{ said }}{{ eos_token }}\n", "<|assistant|>\n")),
    "vicuna": Family(
        _turns(
            _BY_ROLE.format("ASSISTANT: {{ said }}{{ eos_token }}", "USER: {{ said }} "),
            "ASSISTANT:",
            "A chat between a curious user and an assistant. ",
        )
    ),
    "alpaca": Family(
        _turns(
            _BY_ROLE.format("### Response:\n{{ said }}\n\n", "### Instruction:\n{{ said }}\n\n"),
            "### Response:\n",
        )
    ),
    "openchat": Family(
        _turns(
            "GPT4 Correct {{ role | title }}: {{ said }}<|end_of_turn|>",
            "GPT4 Correct Assistant:",
            "{{ bos_token }}",
        ),
        ("<|end_of_turn|>",),
        "<|end_of_turn|>",
    ),
    "command-r": Family(
        _turns(
            "<|START_OF_TURN_TOKEN|>"
            + _BY_ROLE.format("<|CHATBOT_TOKEN|>{{ said | trim }}", "<|USER_TOKEN|>{{ said }}")
            + "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "{{ bos_token }}",
        ),
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
    ),
    "falcon": Family(_turns("{{ role | title }}: {{ said }}\n", "Assistant:")),
    "granite": Family(
        _turns(
            "<|start_of_role|>{{ role }}<|end_of_role|>{{ said }}<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "<|end_of_text|>",
    ),
    # The last answer ends otherwise than earlier ones.
    "gpt-oss": Family(
        _turns(
            _BY_ROLE.format(
                "<|start|>assistant<|channel|>final<|message|>{{ said }}"
                "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}",
                "<|start|>{{ role }}<|message|>{{ said }}<|end|>",
            ),
            "<|start|>assistant",
        ),
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        "<|return|>",
        ("<|call|>",),
    ),
    # Answers end only where another turn follows.
    "olmo-2": Family(
        _turns(
            "<|{{ role }}|>\n{{ said }}"
            "{% if role == 'assistant' and not loop.last %}{{ eos_token }}{% endif %}\n",
            "<|assistant|>\n",
            "{{ bos_token }}",
        )
    ),
    "baichuan": Family(
        _turns(_BY_ROLE.format("<reserved_107>{{ said }}", "<reserved_106>{{ said }}"), "<reserved_107>"),
        ("<reserved_106>", "<reserved_107>"),
    ),
    "minicpm": Family(_turns(_BY_ROLE.format("{{ said }}", "<用户>{{ said | trim }}<AI>"), "")),
    # No marker is a special token; a token may begin in a header and end in an answer.
    "bare": Family(
        _turns(
            "{{ role }}: {{ said }}{% if role == 'assistant' %}{{ eos_token }}{% endif %}\n", "assistant: "
        )
    ),
    "bare-marked": Family(
        _turns(
            "{{ role }}: "
            + _BY_ROLE.format("{% generation %}{{ said }}{{ eos_token }}{% endgeneration %}", "{{ said }}")
            + "\n",
            "assistant: ",
        )
    ),
}


# What real templates write as markers, and the tokens among them that end an answer.
_MARKER = re.compile(
    "<[|\uff5c][^<>|\uff5c\\s]+[|\uff5c]>|" r"<\|?\w+\|>|<\|\w+>|</?think>|</s>|<\w+_of_\w+>"
)
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|end|>"),
    *(
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|return|>",
        "<|call|>",
        "<turn|>",
        "<|tool_response>",
        "<end_of_utterance>",
    ),
    *("<|user|>", "<|observation|>", "<|eot|>", "</s>"),
)


@functools.cache
def real_families() -> dict[str, Family]:
    """The templates of real models that TRL carries."""
    package = find_spec("trl")
    assert package is not None
    assert package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0], "chat_templates")
    found = {}
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        # GPT-OSS's `<|end|>` ends a message, and not an answer.
        ends = [
            end for end in _ENDS if end in template and (end != "<|end|>" or "<|return|>" not in template)
        ]
        found[path.stem] = Family(
            template, tuple(sorted({*_MARKER.findall(template)})), ends[0], tuple(ends[1:])
        )
    return found
