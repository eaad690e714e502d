"""In the gateway's environment: every field of vLLM's requests and every path of its server, as JSON."""

from __future__ import annotations

import inspect
import json
import os

os.environ |= {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}

from transformers import PreTrainedTokenizerBase
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.renderers.hf import safe_apply_chat_template
from vllm.utils.argparse_utils import FlexibleArgumentParser

APPLY = (safe_apply_chat_template, PreTrainedTokenizerBase.apply_chat_template)
app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), ("generate",))
fields = {
    "/v1/completions": CompletionRequest.model_fields,
    "/v1/chat/completions": ChatCompletionRequest.model_fields,
    "/v1/responses": ResponsesRequest.model_fields,
    "/tokenize": TokenizeCompletionRequest.model_fields | TokenizeChatRequest.model_fields,
    "/detokenize": DetokenizeRequest.model_fields,
}
print(
    json.dumps(
        {
            "fields": {path: sorted(each) for path, each in fields.items()},
            "of_templates": [name for each in APPLY for name in inspect.signature(each).parameters],
            "paths": sorted({route.path for route in app.routes if hasattr(route, "path")}),
        }
    )
)
