"""Configs that are refused, with what is said of them, by what reads them."""

import json
from pathlib import Path

WRONG_CONFIGS = json.loads((Path(__file__).resolve().parents[1] / "data/wrong_configs.json").read_text())
