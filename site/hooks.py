"""What the site has besides docs/: pages made from the command's help and from measurements, and files of the project
that pages link to. MkDocs calls the functions by their names."""

import html
import os
import pathlib
import re
import subprocess
import sys

from mkdocs.structure.files import File

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import measurements

import explorer

ROOT = pathlib.Path(__file__).parents[1]
# A link from a page to a file of the project that is outside docs/.
OUTSIDE = re.compile(r"\]\(((?:\.\./)+)(?!\.\.)([^)#\s]+)")


def on_files(files, config):
    add(files, config, "reference/command.md", command_page(os.environ["TESSERA_COMMAND"]))
    add(files, config, "reference/measurements.md", measurements.page(ROOT / "bench/results"))
    add(files, config, "plotly.js", measurements.library())
    for name in ("site.css", "iframe-worker.js"):
        add(files, config, name, (ROOT / "site" / name).read_text())
    add(files, config, "explorer/index.html", pathlib.Path(os.environ["TESSERA_EXPLORER"]).read_text())
    for path in sorted(linked(ROOT / "docs")):
        add(files, config, f"files/{path}", (ROOT / path).read_bytes())
    return files


def add(files, config, uri, content):
    files.append(File.generated(config, uri, content=content))


def linked(docs):
    """Files outside docs/ that pages link to, as paths in the project."""
    found = set()
    for page in docs.rglob("*.md"):
        for up, path in OUTSIDE.findall(page.read_text()):
            target = (page.parent / up / path).resolve()
            if not target.is_relative_to(docs):
                found.add(target.relative_to(ROOT))
    return {path for path in found if (ROOT / path).is_file()}


def live(markdown):
    """Pages with still pictures of the explorer have it itself in their places, in the same states."""
    for still in explorer.stills(markdown):
        source = html.escape(f"explorer/index.html#embed=1&{still.state}")
        frame = f'<iframe class="explorer" loading="lazy" src="{source}" title="{html.escape(still.alt)}"></iframe>'
        markdown = markdown.replace(still.text, frame)
    return markdown


def on_page_markdown(markdown, page, config, files):
    markdown = live(markdown)
    folder = pathlib.PurePosixPath(page.file.src_uri).parent
    depth = len(folder.parts)

    def moved(match):
        ups, path = match[1].count("../"), match[2]
        return f"]({'../' * depth}files/{path}" if ups == depth + 1 else match[0]

    return OUTSIDE.sub(moved, markdown)


def command_page(command):
    """The command's own help, and that of each of its commands."""
    text = help_of(command)
    listed = text[text.index("\nSubcommands:") :].partition("\n\n")[0]
    names = re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE)
    parts = ["# The `tessera` command\n\nWhat `--help` prints.\n", fenced(text)]
    for name in names:
        parts += [f"## tessera {name}\n", fenced(help_of(command, name))]
    return "\n".join(parts)


def help_of(*command):
    return subprocess.run([*command, "--help"], check=True, capture_output=True, text=True).stdout


def fenced(text):
    return f"```text\n{text.rstrip()}\n```\n"
