"""Hooks of mkdocs.yml: what the site has beside the pages of docs/, and links that lead the same way in both.

In the repository README.md stands at the root and the pages below it, in docs/; on the site docs/ is the root, and
README.md its first page. A link to a file of the repository that is no page becomes the file's name.
"""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

import reference  # beside this file
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("models", "infer", "train", "export", "serve")
_LINK = re.compile(r"\[([^\]]*)\]\(([\w./-]+)(#[\w-]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand elsewhere, and those that are made of the code."""
    pages = [ROOT / "THREATS.md", *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
    made = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages}
    made["index.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    made |= {"keys.md": reference.keys_page(), "api.md": reference.api_page()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them, and marks of blocks (`tests/documents.py`) as their titles."""
    here = page.file.src_uri

    def lead(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        there = normpath(f"{dirname(_in_repository(here))}/{target}".lstrip("/"))
        if files.get_file_from_path(found := _on_site(there)):
            return f"[{text}]({relpath(found, dirname(here) or '.')}{anchor})"
        return f"`{there}`" if (ROOT / there).exists() else match[0]

    markdown = re.sub(r"^<!-- file: (.+?) -->\n```(\w+)$", r'```\2 title="\1"', markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^<!-- needs: (.+?) -->\n```\w*$", r'```sh title="needs: \1"', markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^```python \w+$", "```python", markdown, flags=re.MULTILINE)
    return _LINK.sub(lead, markdown)


def _in_repository(page: str) -> str:
    """Where a page of the site stands, or would, in the repository."""
    if page == "index.md":
        return "README.md"
    return page if (ROOT / page).exists() else f"docs/{page}"


def _on_site(path: str) -> str:
    """Where a file of the repository stands on the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")
