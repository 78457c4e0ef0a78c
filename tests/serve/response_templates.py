"""Formats of answers as transformers' response_template, which a checkpoint or a file may have."""

_CALL_TEMPLATE = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_THINKING_TEMPLATE = {"open": "<think>", "close": "</think>", "repeats": False}
TOOL_CALL_FORMATS = {
    "hermes": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": _THINKING_TEMPLATE,
            "content": {},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _CALL_TEMPLATE,
            },
        },
    },
    "mistral": {
        "start_anchor": "[/INST]",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "[TOOL_CALLS]",
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
                "transform_each": True,
            },
        },
    },
    "llama3-json": {
        "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "fields": {
            "content": {},
            "tool_calls": {
                "open_pattern": r"(?:<\|python_tag\|>)?(?=\{\s*\"(?:type|name)\")",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                },
            },
        },
    },
}
"""Tool-call formats of model families (Hermes and Qwen, Mistral, Llama 3), each a transformers ``response_template``."""
