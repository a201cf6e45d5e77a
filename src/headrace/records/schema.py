"""The published JSON Schema of ``headrace.run/1``, made from the types in ``run.py``; ``run.schema.json`` is its copy.

``python -m headrace.records.schema > src/headrace/records/run.schema.json`` renews the copy after a change.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from headrace.records.run import RUN_FORMAT, Run

SCHEMA_NAME = "run.schema.json"


def make_schema() -> dict[str, Any]:
    """Returns the schema (draft 2020-12). Unknown keys are allowed everywhere, as readers ignore them."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": RUN_FORMAT}
    return head | msgspec.json.schema(Run)


def schema_text() -> str:
    """Returns the text of ``run.schema.json``."""
    return json.dumps(make_schema(), indent=1, sort_keys=True, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
