"""What SARIF 2.1.0 asks of the objects that `bigpool audit` writes, as a JSON schema of its own.

The standard's own schema is not part of this repository. Name it in BIGPOOL_SARIF_SCHEMA and the tests use it.
"""

from __future__ import annotations

from typing import Any

COUNT = {"type": "integer", "minimum": 1}
TEXT = {"type": "string"}


def only(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def several(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


MESSAGE = only("text", text=TEXT, markdown=TEXT)
REGION = only("startLine", startLine=COUNT, startColumn=COUNT, endLine=COUNT, endColumn=COUNT)
PLACE = only("artifactLocation", artifactLocation=only("uri", uri={"type": "string", "format": "uri-reference"}), region=REGION)
LOCATION = only("", physicalLocation=PLACE, message=MESSAGE)
LEVEL = {"enum": ["none", "note", "warning", "error"]}
RULE = only("id", id=TEXT, name=TEXT, shortDescription=MESSAGE, help=MESSAGE)
RESULT = only(
    "message",
    ruleId=TEXT,
    ruleIndex={"type": "integer", "minimum": -1},
    level=LEVEL,
    message=MESSAGE,
    locations=several(LOCATION),
    relatedLocations=several(LOCATION, uniqueItems=True),
    partialFingerprints={"type": "object", "additionalProperties": TEXT},
    properties={"type": "object"},
)
NOTICE = only("message", level=LEVEL, message=MESSAGE)
INVOCATION = only("executionSuccessful", executionSuccessful={"type": "boolean"}, toolExecutionNotifications=several(NOTICE))
RUN = only(
    "tool",
    tool=only("driver", driver=only("name", name=TEXT, rules=several(RULE, uniqueItems=True))),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    invocations=several(INVOCATION),
    results=several(RESULT),
)
SUBSET = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    **only(
        "version runs", **{"$schema": {"type": "string", "format": "uri"}, "version": {"const": "2.1.0"}, "runs": several(RUN)}
    ),
}
