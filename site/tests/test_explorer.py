"""The explorer in a real browser: its engine answers as the library does, every control changes what it should, every
state is in the URL, and it can be used by keyboard, on a phone, in light and in dark."""

import json
import os
import random
import re
import subprocess

import pytest

NATIVE, COMMAND = os.environ["TESSERA_ANSWERS"], os.environ["TESSERA_COMMAND"]
VIEWS = ("mask", "order", "softmax", "bytes", "kernels")
CACHED = "fwd bf16 b=4 h=8/2 q=1 k=500 d=64 cache=after pages=200x16"


def natively(requests):
    lines = "".join(f"{line}\n" for line in requests)
    return subprocess.run([NATIVE], input=lines, capture_output=True, text=True, check=True).stdout.splitlines()


def in_the_page(explorer, requests):
    """What the engine that the page itself has inside says."""
    return explorer.driver.execute_async_script(
        "const [lines, done] = arguments;"
        "import('explorer/engine.js').then(({load}) =>"
        "  load({base64: document.getElementById('engine-bytes').textContent.trim()})).then((engine) =>"
        "  done(lines.map((line) => engine.answer(line))));",
        requests,
    )


def test_engine_answers_as_the_library(explorer):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    asked = subprocess.run([NATIVE, "problems", str(seed), "200"], capture_output=True, text=True, check=True)
    rng = random.Random(seed)
    requests = []
    for problem in asked.stdout.splitlines():
        device = rng.choice(("h200", "h200", "a100", "zen4-16"))
        requests += [f"{what}\t{problem}\t{device}" for what in ("plan", "tiles", "order")]
    explorer.open()
    answers = in_the_page(explorer, requests)
    for request, native, page in zip(requests, natively(requests), answers, strict=True):
        assert page == native, request
    good = [request for request, answer in zip(requests, answers, strict=True) if "error" not in json.loads(answer)]
    assert len(good) > len(requests) // 4


def test_every_view_shows_something(explorer):
    for problem in (
        "fwd bf16 b=2 h=8/2 q=2048 k=2048 d=128 causal",
        CACHED,
        "bwd bf16 h=4 q=300 k=300 d=64 window=90,0",
    ):
        for view in VIEWS:
            explorer.open(f"view={view}&problem={problem}")
            assert explorer.text("#sentence") == "", (view, problem)
            shown = explorer.run(
                "return [...document.querySelectorAll('main section')].filter((s) => !s.hidden).map((s) => s.id)"
            )
            assert shown == [view]
            if view in ("mask", "order"):
                assert explorer.colours(f"#{view} canvas") > 2
            else:
                assert len(explorer.text(f"#{view}")) > 200


def test_page_shows_what_the_engine_says(explorer):
    problem = "fwd bf16 b=2 h=8/2 q=1000 k=1500 d=128 window=300,10"
    request = [f"tiles\t{problem}\th200\tbatch=1\thead=5", f"order\t{problem}\th200", f"plan\t{problem}\th200"]
    tiles, order, plan = map(json.loads, natively(request))
    explorer.open(f"view=mask&batch=1&head=5&problem={problem}")
    counts = tiles["counts"]
    expected = f"Skipped {counts['skipped']:,}, masked {counts['masked']:,}, full {counts['full']:,}"
    assert expected in explorer.text("#mask")
    explorer.click("#tab-order")
    assert f"{order['pieces']:,} pieces" in explorer.text("#order")
    assert f"{round(order['end']):,} cycles" in explorer.text("#order")
    explorer.click("#tab-kernels")
    assert explorer.text("#kernels pre") == plan["text"]
    assert explorer.text("#kernels tr.chosen th") == plan["kernel"]
    refused = [row for row in plan["rows"] if "refusal" in row]
    assert explorer.run("return document.querySelectorAll('#kernels tr.refused').length") == len(refused)
    assert refused[0]["refusal"] in explorer.text("#kernels tr.refused")


@pytest.mark.parametrize(("control", "value", "word"), [
    ("pass", "bwd", "bwd"), ("dtype", "f16", "f16"), ("b", "3", "b=3"), ("heads", "16", "h=16/2"),
    ("heads_k", "4", "h=8/4"), ("q", "100", "q=100"), ("k", "3000", "k=3000"), ("d", "64", "d=64"),
    ("causal", False, "-causal"), ("left", "100", "window=100,-1"), ("right", "7", "window=-1,7"),
    ("align", "tl", "align=tl"),
    ("chunk", "512", "chunk=512"), ("sink_tokens", "4", "sink_tokens=4"), ("tree", True, "tree"),
    ("alibi", True, "alibi=h"),
    ("softcap", "30", "softcap=30"), ("sink", True, "sink"), ("dropout", "0.1", "dropout=0.1"),
    ("packed", True, "packed=3072,3072"), ("cache", "after", "cache=after"), ("deterministic", True, "deterministic"),
    ("batch_invariant", True, "batch_invariant"),
])  # fmt: skip
def test_control_writes_its_word(explorer, control, value, word):
    explorer.open("view=kernels")
    before = explorer.text("#kernels pre")
    explorer.put(f"#control-{control}", value)
    words = explorer.run("return document.getElementById('problem').value").split()
    assert (word[1:] not in words) if word.startswith("-") else (word in words)
    assert explorer.fragment()["problem"].split() == words
    sentence = explorer.text("#sentence")
    assert sentence or explorer.text("#kernels pre") != before  # what makes no sense is said


@pytest.mark.parametrize(("control", "value", "word"), [
    ("page", "64", "pages=32x64"), ("leftpad", True, "leftpad"), ("cache", "before", "cache=before:1"),
    ("cache", "none", "-cache=after"),
])  # fmt: skip
def test_control_of_a_cache(explorer, control, value, word):
    explorer.open(f"view=mask&problem={CACHED}")
    explorer.put(f"#control-{control}", value)
    words = explorer.run("return document.getElementById('problem').value").split()
    assert (word[1:] not in words) if word.startswith("-") else (word in words)
    assert explorer.text("#sentence") == ""


def test_device_and_examples(explorer):
    explorer.open("view=kernels")
    explorer.put("#device", "zen4-16")
    assert "cpu.avx512_bf16.forward.tile.bf16 is chosen" in explorer.text("#kernels")
    explorer.put("#device", "a100")
    assert "sm80.forward.bf16.d128" in explorer.text("#kernels")
    explorer.put("#device", "h200")
    lines = explorer.run(
        "return [...document.getElementById('example').options].map((o) => o.value).filter((line) => line !== '')"
    )
    assert len(lines) > 5
    for line in lines:
        explorer.put("#device", "zen4-16" if "f32" in line else "h200")
        explorer.put("#example", line)
        for view in ("mask", "order"):
            explorer.click(f"#tab-{view}")
            assert explorer.text("#sentence") == "", line


def test_bad_input_has_the_parsers_sentence(explorer):
    explorer.open()
    for line in ("fwd bf16 q=10 k=x d=64", "fwd bf17 q=10 k=10 d=64", "fwd q=10 k=10", "fwd f32 h=3/2 q=5 k=5 d=8"):
        explorer.put("#problem", line)
        done = subprocess.run(
            [COMMAND, "plan", "--device", "h200", "--", line], capture_output=True, text=True, check=False
        )
        said = (
            (done.stderr or done.stdout).removeprefix("tessera: ").rstrip().split("\n")[-1].removeprefix("invalid    ")
        )
        assert said and explorer.text("#sentence") == said
    explorer.put("#problem", "fwd bf16 q=10 k=10 d=64")
    assert explorer.text("#sentence") == ""
    explorer.open("view=softmax")
    explorer.put("#softmax-scores", "1 2 three")
    assert '"three" is no number' in explorer.text("#softmax")


def test_state_is_in_the_url(explorer):
    explorer.open()
    explorer.put("#problem", "fwd bf16 b=3 h=4 q=700 k=900 d=64 causal")
    explorer.put("#mask-batch", "2")
    explorer.put("#mask-head", "3")
    explorer.key("#mask canvas", "ArrowDown")
    explorer.click("#tab-order")
    explorer.put("#time", "0.5")
    before, told = explorer.fragment(), explorer.text("#order .told")
    assert before["batch"] == "2" and before["head"] == "3" and before["row"] and before["view"] == "order"
    url = explorer.run("return location.hash.slice(1)")
    explorer.open(url)
    assert explorer.text("#order .told") == told
    explorer.click("#tab-mask")
    assert explorer.run("return document.getElementById('mask-head').value") == "3"
    assert explorer.fragment() == before | {"view": "mask"} or "view" not in explorer.fragment()


def test_tiles_are_told(explorer):
    problem = "fwd bf16 b=2 h=4 q=1024 k=1024 d=128 causal"
    explorer.open(f"problem={problem}")
    tiles, order = map(json.loads, natively([f"tiles\t{problem}\th200", f"order\t{problem}\th200"]))
    first = next(tile for piece in tiles["list"] for tile in piece["tiles"] if tile[4] == 1)
    told = explorer.text("#mask .told")
    assert f"Rows {first[0]} to {first[1] - 1}" in told and "masked" in told
    items = [dict(zip(order["columns"], row, strict=True)) for row in order["list"]]
    piece = next(x for x in items if x["batch"] == 0 and x["head"] == 0 and x["first_row"] <= first[0] < x["end_row"])
    assert f"Piece {piece['index']} of {order['pieces']}, multiprocessor {piece['worker']}," in told
    # Beside it, by keyboard: skipped, since the mask is causal.
    explorer.key("#mask canvas", "ArrowRight")
    assert "skipped" in explorer.text("#mask .told")
    explorer.run(
        "const canvas = document.querySelector('#mask canvas'), box = canvas.getBoundingClientRect();"
        "canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 2, clientY: box.bottom - 2}));"
    )
    assert "full" in explorer.text("#mask .told")


def test_elements_are_the_masks(explorer):
    problem = "fwd bf16 b=1 h=4 q=64 k=64 d=64 window=5,2"
    explorer.open(f"problem={problem}")
    (answer,) = map(json.loads, natively([f"elements\t{problem}\t\tqueries=32\tkeys=32"]))
    seen = sum(line.count("1") for line in answer["visible"])
    assert f"{seen} of 1,024 are seen" in explorer.text("#mask")


def test_order_steps_plays_and_scrubs(explorer):
    problem = "fwd bf16 b=4 h=8 q=4096 k=4096 d=128 causal"
    explorer.open(f"view=order&time=0&problem={problem}")
    assert "At cycle 0: 0 pieces done, 132 under way, 0 of 132 multiprocessors idle" in explorer.text("#order .told")
    explorer.click("#step")
    after_one = explorer.text("#order .told")
    assert "At cycle 0:" not in after_one
    explorer.click("#step-back")
    assert "At cycle 0:" in explorer.text("#order .told")
    explorer.key("#order canvas", "ArrowRight")
    assert explorer.text("#order .told") == after_one
    explorer.put("#time", "1")
    (order,) = map(json.loads, natively([f"order\t{problem}\th200"]))
    assert f"{order['pieces']:,} pieces done, 0 under way" in explorer.text("#order .told")
    explorer.put("#time", "0.2")
    explorer.click("#play")
    explorer.wait("Number(new URLSearchParams(location.hash.slice(1)).get('time')) > 0.21")
    explorer.click("#play")
    stopped = explorer.fragment()["time"]
    explorer.wait("true")
    assert explorer.fragment()["time"] == stopped


def test_softmax_block_by_block(explorer):
    explorer.open("view=softmax&scores=1 2 9 3 -inf 4&values=1 2 3 4 5 6&block=2&slack=0&step=0")
    (answer,) = map(json.loads, natively(["softmax\t\t\tscores=1,2,9,3,-inf,4\tvalues=1,2,3,4,5,6\tblock=2\tslack=0"]))
    assert "0 of 3 blocks taken" in explorer.text("#softmax .told")
    explorer.click("#block-on")
    explorer.click("#block-on")
    assert "2 of 3 blocks taken; the output was rescaled 1 time." in explorer.text("#softmax .told")
    explorer.click("#block-on")
    rows = explorer.run(
        "return [...document.querySelectorAll('#softmax tbody tr')].map("
        "  (row) => [...row.children].map((cell) => cell.textContent))"
    )
    assert len(rows) == 3 and "rescales" in rows[1][3] and "stays" in rows[2][3]
    assert float(rows[2][5]) == pytest.approx(answer["blocks"][2]["sum"], rel=1e-4)
    result = explorer.text("#softmax-result")
    shown = [float(number) for number in re.findall(r"output (-?[\d.]+),", result)]
    assert shown == pytest.approx([answer["three_steps"]["output"]] * 2, rel=1e-4)
    explorer.put("#softmax-slack", "20")
    assert "rescaled 0 times" in explorer.text("#softmax .told")
    before = explorer.fragment()["scores"]
    explorer.click("#random")
    assert explorer.fragment()["scores"] != before


def test_bytes_and_caches(explorer):
    explorer.open("view=bytes&problem=fwd bf16 q=100 k=100 d=128")
    (answer,) = map(json.loads, natively(["bytes\tfwd bf16 q=100 k=100 d=128\th200\tseqlens=131072"]))
    for level in answer["levels"]:
        ratio = level["list"][0]["standard"] / level["list"][0]["tiled"]
        assert f"{ratio:.1f} times as many bytes into it" in explorer.text("#bytes")
    assert "no cache" in explorer.text("#cache-bytes")
    explorer.put("#problem", CACHED)
    assert "pages of 16 slots" in explorer.text("#cache-bytes")


def test_tabs_by_keyboard_and_for_readers(explorer):
    explorer.open()
    for view in (*VIEWS[1:], VIEWS[0]):
        explorer.key("[role=tab][aria-selected=true]", "ArrowRight")
        assert explorer.run("return document.activeElement.id") == f"tab-{view}"
        assert explorer.run("return document.getElementById(arguments[0]).hidden", view) is False
    unnamed = explorer.run(
        "return [...document.querySelectorAll('input, select, canvas, [role=img]')].filter((each) =>"
        "  !(each.labels?.length || each.getAttribute('aria-label') || each.closest('[hidden]')))"
        ".map((each) => each.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_and_schemes(explorer, scheme):
    explorer.resize(390, 800, scheme)
    for view in VIEWS:
        explorer.open(f"view={view}")
        width, inside = explorer.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert width <= inside, view
    dark = explorer.run("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
