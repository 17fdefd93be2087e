"""What mkdocs does besides rendering: pages from elsewhere in the repository, the reference, and mathematics.

Formulas become MathML while the site is built, which browsers show by themselves: no script is needed.
"""

from __future__ import annotations

import posixpath
import re
from html import unescape
from pathlib import Path

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent

# page → the file it is, which readers of the repository find where it belongs
ELSEWHERE = {
    "derivation.md": "src/outeffhop/ops/README.md",
    "proofs.md": "src/outeffhop/memory/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}

# The public API: the modules whose __all__ makes a page each, and what the index calls their part.
REFERENCE = {
    "The library": (
        "functional",
        "methods",
        "ops",
        "memory",
        "memory.theory",
        "nn",
        "nn.hflayers",
        "models",
        "models.presets",
        "metrics",
        "outliers",
        "quantization",
    ),
    "The lab": ("lab.data", "lab.training", "lab.diagnosis", "lab.mending", "lab.paper", "lab.report"),
}
MODULES = [module for part in REFERENCE.values() for module in part]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = ["reference/index.md", *({f"outeffhop.{name}": _page(name)} for name in MODULES)]
    config.nav = [
        {"Reference": pages} if part == {"Reference": "reference/index.md"} else part for part in config.nav or ()
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for page, text in reference().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the repository has them lead to the same places on the site."""
    here = page.file.src_uri
    at = posixpath.dirname(ELSEWHERE.get(here, f"docs/{here}"))
    pages = {path: name for name, path in ELSEWHERE.items()}

    def on_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(at, match[1]))
        target = pages.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}"

    return re.sub(r"\]\((?!\w+:)([^)#\s]+)", on_site, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """What arithmatex has marked as a formula, as MathML."""
    html = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', lambda m: _mathml(m[1], "inline"), html, flags=re.S)
    return re.sub(
        r'<div class="arithmatex">\\\[(.*?)\\\]</div>',
        lambda m: f'<div class="formula">{_mathml(m[1], "block")}</div>',
        html,
        flags=re.S,
    )


def _mathml(latex: str, display: str) -> str:
    formula = convert(unescape(latex), display=display)
    # a bar of a norm that stretches by itself sinks below the line where it has an exponent
    return formula.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')


def _page(module: str) -> str:
    return f"reference/{module.replace('.', '-')}.md"


def reference() -> dict[str, str]:
    """Pages of the reference, written from what each module's ``__all__`` says."""
    package = griffe.load("outeffhop", search_paths=[str(ROOT / "src")])
    pages = {}
    for module in MODULES:
        shown = "\n\n".join(f"::: {path}" for path in _public(package[module]).values())
        pages[_page(module)] = f"# outeffhop.{module}\n\n{_summary(package[module])}\n\n{shown}\n"
    root = {path: name for name, path in _public(package).items()}
    parts = []
    for title, modules in REFERENCE.items():
        parts.append(f"## {title}\n")
        for module in modules:
            parts.append(f"### [`outeffhop.{module}`]({posixpath.basename(_page(module))})\n")
            parts.append(f"{_summary(package[module])}\n\n| name | |\n|---|---|")
            for name, path in _public(package[module]).items():
                also = f" (also `outeffhop.{name}`)" if name in root.values() else ""
                parts.append(f"| [`{name}`][{path}] | {_first_line(package[module][name])}{also} |")
            parts.append("")
    pages["reference/index.md"] = (
        "# Reference\n\nThese names are public; every other name may change without notice. After `import outeffhop` "
        "each is reached by its dotted name, such as `outeffhop.outliers.measure`.\n\n" + "\n".join(parts) + "\n"
    )
    return pages


def _first_line(thing: griffe.Object | griffe.Alias) -> str:
    text = thing.docstring.value.splitlines()[0] if thing.docstring else ""
    return text.replace("|", "\\|")


def _public(module: griffe.Module) -> dict[str, str]:
    """Public name → where its documentation is; modules have pages of their own."""
    paths = {}
    for name in _exports(module):
        path = f"{module.path}.{name}"
        if module[name].is_module:  # or a function with the name of the module it is in, as convert.convert
            path = module.imports.get(name, path)
        if path != module[name].path or not module[name].is_module:
            paths[name] = path
    return paths


def _exports(module: griffe.Module) -> list[str]:
    return [str(name).strip("'\"") for name in module.exports or ()]


def _summary(module: griffe.Module) -> str:
    return module.docstring.value.splitlines()[0] if module.docstring else ""
