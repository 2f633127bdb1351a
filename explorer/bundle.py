"""Makes the explorer one file: style sheet, modules and engine inside. A page that is opened from a folder may load
no module and no WebAssembly from beside it.

    python3 explorer/bundle.py ENGINE.wasm OUTPUT.html
"""

import base64
import json
import pathlib
import re
import sys

PAGE = pathlib.Path(__file__).parent / "page"


def data_url(kind, text):
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def module(path):
    """A module whose imports of its neighbours go through the import map: in a data URL nothing is relative."""
    return re.sub(r'(from|import) "\./([\w.]+)"', r'\1 "explorer/\2"', path.read_text())


def bundle(engine):
    main = PAGE / "explorer.js"
    modules = {path for path in PAGE.glob("*.js") if path != main}
    imports = {f"explorer/{path.name}": data_url("text/javascript", module(path)) for path in sorted(modules)}
    parts = {
        '<link rel="stylesheet" href="explorer.css">': f"<style>\n{(PAGE / 'explorer.css').read_text()}</style>",
        '<script type="module" src="explorer.js"></script>': (
            f'<script type="importmap">{json.dumps({"imports": imports})}</script>\n'
            f'<script type="text/plain" id="engine-bytes">{base64.b64encode(engine).decode()}</script>\n'
            f'<script type="module">\n{module(main)}</script>'
        ),
    }
    text = (PAGE / "index.html").read_text()
    for mark, replacement in parts.items():
        if text.count(mark) != 1:
            sys.exit(f"{PAGE / 'index.html'}: must have {mark} once")
        text = text.replace(mark, replacement)
    return text


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    pathlib.Path(sys.argv[2]).write_text(bundle(pathlib.Path(sys.argv[1]).read_bytes()))
