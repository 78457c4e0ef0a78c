"""Formats of answers as transformers' response_template, which a checkpoint or a file may have."""

import json
from pathlib import Path

TOOL_CALL_FORMATS = json.loads((Path(__file__).resolve().parents[1] / "data/response_templates.json").read_text())
"""Tool-call formats of model families (Hermes and Qwen, Mistral, Llama 3), each a transformers ``response_template``."""
