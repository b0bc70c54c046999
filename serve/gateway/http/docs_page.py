"""Documentation of the API as one page, without scripts or external resources, so that it works offline."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .4rem 0; overflow-wrap: anywhere }
summary b { display: inline-block; min-width: 4.5rem }
details { border-top: 1px solid #8884 } details > div { padding: 0 0 1rem 1rem }
table { border-collapse: collapse; width: 100% } td { padding: .2rem .6rem .2rem 0; vertical-align: top }
pre { overflow-x: auto; background: #8882; padding: .6rem } :root { color-scheme: light dark }"""


def docs_page(described: Mapping[str, Any]) -> str:
    """The page of an OpenAPI description."""
    info = described["info"]
    parts = "".join(_operations(described))
    about = escape(info["description"]).replace("\n", " ")
    return (
        f'<!doctype html><html lang=en><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><h1>{escape(info["title"])}</h1>'
        f'<p>{about}<p>The same for programs: <a href="/openapi.json">/openapi.json</a>.{parts}'
    )


def _operations(described: Mapping[str, Any]) -> Iterator[str]:
    group = None
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != group:
                group = operation["tags"][0]
                yield f"<h2>{escape(group)}</h2>"
            description = escape(operation.get("description", "")).replace("\n\n", "<p>")
            rows = "".join(_rows(operation, described["components"]["schemas"]))
            yield (
                f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code></summary><div><p>{description}"
                f"<table>{rows}</table><pre>{escape(_example(method, path, operation))}</pre></div></details>"
            )


def _rows(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """A line of the table for each parameter, and each field of the body."""
    for parameter in operation.get("parameters", ()):
        yield _row(parameter["name"], parameter["in"], parameter["schema"], parameter.get("description", ""))
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = _resolved(content["schema"], schemas)
        yield f"<tr><td colspan=3><b>{escape(kind)}</b>"
        for name, about in schema.get("properties", {}).items():
            yield _row(name, _type(_resolved(about, schemas)), about, about.get("description", ""))


def _row(name: str, kind: str, schema: Mapping[str, Any], description: str) -> str:
    choices = ", ".join(map(str, schema.get("enum", ())))
    return f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{escape(description or choices)}"


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _type(schema: Mapping[str, Any]) -> str:
    kinds = [schema, *schema.get("anyOf", ())]
    return ", ".join(str(each.get("format", each["type"])) for each in kinds if each.get("type", "null") != "null")


def _example(method: str, path: str, operation: Mapping[str, Any]) -> str:
    words = ["curl", *(["-X", method.upper()] if method != "get" else []), f"http://HOST:8080{path}"]
    if not path.startswith("/health/"):
        words += ["-H 'Authorization: Bearer KEY'"]
    kinds = operation.get("requestBody", {}).get("content", {})
    if "application/json" in kinds:
        words += ['--json \'{"prompt": "a red seven moving left"}\'']
    elif kinds:
        words += ["-F name=NAME -F file=@FILE"]
    return " ".join(words)
