"""The explorer's pictures in pages: each is a link to the state that it shows."""

import dataclasses
import re

# [![alt](figures/explorer_name.png)][state], and below [state]: explorer/index.html#...
STILL = re.compile(r"\[!\[([^\]]*)\]\(figures/explorer_(\w+)\.png\)\]\[(\w+)\]")


@dataclasses.dataclass
class Still:
    text: str  # as it stands in the page
    alt: str
    name: str  # of figures/explorer_{name}.png
    state: str  # the fragment of the explorer's URL


def stills(markdown):
    states = dict(re.findall(r"^\[(\w+)\]: explorer/index\.html#(.+)$", markdown, re.MULTILINE))
    return [Still(match[0], match[1], match[2], states[match[3]]) for match in STILL.finditer(markdown)]
