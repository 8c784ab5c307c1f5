"""Hooks of mkdocs.yml: pages of kvcached's API, and documents from outside docs/.

mkdocs build        writes build/site; a dead link or an unknown name of the API is an error
mkdocs serve        shows the site while the documents are edited
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Page -> title and modules with its public names.
API = {
    "device": ("Devices and their usage", ("device", "usage", "driver.driver_memory")),
    "client": ("Clients", ("client",)),
    "kvcache": ("KV caches", ("kvcache", "group", "ranks")),
    "handover": ("Moving KV between processes", ("handover.offer",)),
    "balloon": ("Giving memory back", ("balloon", "memory_requests")),
    "layouts": ("Layouts", ("layouts",)),
    "models": ("Models", ("models",)),
    "weights": (
        "Weights",
        (
            "weights.arena",
            "weights.builder",
            "weights.checkpoint",
            "weights.entry",
            "weights.links",
            "weights.prefetch",
            "weights.spec",
            "weights.store",
        ),
    ),
    "tensor": ("Tensors", ("tensor",)),
    "segments": ("Segments in shared memory", ("monitoring.segments",)),
    "monitoring": ("Monitoring", ("monitoring.snapshot", "prometheus")),
    "testing": ("Testing", ("testing",)),
    "errors": ("Exceptions", ("errors",)),
}
# Documents that are pages of the site, under project/.
DOCUMENTS = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/README.md",
    "lab/papers/NOTES.md",
    "traces/README.md",
)
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages."""
    for name, (title, modules) in API.items():
        blocks = "\n\n".join(f"::: kvcached.{module}" for module in modules)
        files.append(File.generated(config, f"api/{name}.md", content=f"# {title}\n\n{blocks}\n"))
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        files.append(File.generated(config, f"project/{document}", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrites links to other files of the repository: to their pages, or to plain text."""
    here = page.file.src_uri
    origin = here.removeprefix("project/") if here.startswith("project/") else f"docs/{here}"

    def replaced(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return found.group()
        file = os.path.normpath(os.path.join(os.path.dirname(origin), path))
        uri = file.removeprefix("docs/") if file.startswith("docs/") else f"project/{file}"
        if files.get_file_from_path(uri) is None:
            return text
        new = os.path.relpath(uri, os.path.dirname(here) or ".")
        return f"[{text}]({new}#{anchor})" if anchor else f"[{text}]({new})"

    return LINK.sub(replaced, markdown)
