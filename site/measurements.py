"""The measurements in bench/results as a page of figures that can be zoomed, hovered and switched off line by line."""

import csv
import json
import statistics

import plotly
import plotly.graph_objects as go

COLOURS = ("#2f6fb5", "#e39b2d", "#3a9d6a", "#c43d6b", "#7d5fc0", "#6b7785")


def library():
    return plotly.offline.get_plotlyjs()


def page(results):
    parts = [
        "# Measurements\n",
        "Figures drawn from `bench/results` when this page was made. Hover for numbers, click a name to hide its line,",
        "drag to zoom. [Performance](../performance.md) says how each was measured, and what was not reached.\n",
        '<script src="../plotly.js"></script>\n',
    ]
    for number, (title, text, figure) in enumerate(figures(results)):
        parts += [f"## {title}\n", f"{text}\n", drawn(f"figure-{number}", title, figure)]
    return "\n".join(parts)


def drawn(name, title, figure):
    figure.update_layout(
        template="plotly_white", margin={"l": 60, "r": 20, "t": 30, "b": 50}, height=430, hovermode="x unified",
        legend={"orientation": "h", "y": -0.2}, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#7a8695"}, modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#7a8695"},
    )  # fmt: skip
    data = json.dumps(json.loads(figure.to_json())).replace("</", "<\\/")
    return (
        f'<div id="{name}" class="figure" role="img" aria-label="{title}"></div>\n'
        f"<script>{{const figure = {data}; "
        f'Plotly.newPlot("{name}", figure.data, figure.layout, {{responsive: true, displaylogo: false}});}}</script>\n'
    )


def figures(results):
    for direction in ("forward", "backward"):
        rows = read(results / f"h200_{direction}.csv")
        for d in ("64", "128", "256"):
            yield (
                f"H200, {direction}, head dim {d}, bf16",
                "TFLOP/s over the length of a sequence; 16,384 tokens in all, medians.",
                speeds(
                    [
                        row
                        for row in rows
                        if row["d"] == d and row["dtype"] == "bf16" and row.get("deterministic", "0") == "0"
                    ]
                ),
            )
    yield (
        "H200, decoding",
        "Share of a plain read of the same bytes in the same run, over the size of keys and values; one point a shape.",
        decoding(read(results / "h200_decode.csv")),
    )
    yield (
        "H200, training",
        "Tokens a second of `bench/train.py` over the context, median of all steps.",
        training(read(results / "h200_train.csv")),
    )
    yield (
        "Two CPU cores, forward, fp32",
        "Time over the length of a sequence, beside PyTorch and three steps over BLAS.",
        cpu([row for row in read(results / "cpu.csv") if row["pass"] == "fwd" and row["dtype"] == "f32"]),
    )


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def line(figure, name, xs, ys, colour, dash="solid"):
    figure.add_trace(go.Scatter(x=xs, y=ys, name=name, mode="lines+markers", line={"color": colour, "dash": dash}))


def log_axis(figure, title):
    figure.update_xaxes(type="log", dtick=0.30102999566, title=title, tickformat=",d")


def speeds(rows):
    figure = go.Figure()
    for causal, dash in (("0", "solid"), ("1", "dot")):
        for column, name, colour in (("tessera", "Tessera", COLOURS[0]), ("cudnn", "cuDNN", COLOURS[1])):
            by_length = grouped((int(row["s"]), float(row[column])) for row in rows if row["causal"] == causal)
            line(figure, f"{name}, {'causal' if causal == '1' else 'full'}", *by_length, colour, dash)
    log_axis(figure, "seqlen")
    figure.update_yaxes(title="TFLOP/s", rangemode="tozero")
    return figure


def grouped(pairs):
    """xs, and the median of the ys of each."""
    found = {}
    for x, y in pairs:
        found.setdefault(x, []).append(y)
    xs = sorted(found)
    return xs, [statistics.median(found[x]) for x in xs]


def decoding(rows):
    figure = go.Figure()
    for page, colour in zip(("contiguous", "1", "16", "64", "256"), COLOURS, strict=False):
        of_page = [row for row in rows if row["page"] == page and row["sq"] == "1"]
        figure.add_trace(go.Scatter(
            x=[float(row["gb_per_s"]) * float(row["us"]) / 1e6 for row in of_page],
            y=[float(row["of_read"]) for row in of_page],
            text=["{b} x {seqlen_k}, {h}/{hk}, d = {d}: {us} us".format(**row) for row in of_page],
            name=page if page == "contiguous" else f"page {page}", mode="markers", marker={"color": colour, "size": 9},
        ))  # fmt: skip
    figure.update_xaxes(type="log", title="GB of keys and values")
    figure.update_yaxes(title="share of a plain read", range=[0, 1.05])
    return figure


def training(rows):
    figure = go.Figure()
    names = {row["attention"] for row in rows}
    for name, colour in zip(sorted(names), COLOURS, strict=False):
        steps = [row for row in rows if row["attention"] == name and row["tokens_per_s"]]  # the first has no speed
        line(figure, name, *grouped((int(row["context"]), float(row["tokens_per_s"])) for row in steps), colour)
    log_axis(figure, "context")
    figure.update_yaxes(title="tokens a second", rangemode="tozero")
    return figure


def cpu(rows):
    figure = go.Figure()
    for column, name, colour in (
        ("seconds", "Tessera", COLOURS[0]), ("torch_seconds", "PyTorch", COLOURS[1]),
        ("three_step_seconds", "three steps", COLOURS[3]),
    ):  # fmt: skip
        chosen = [
            row for row in rows if row["d"] == "64" and row["causal"] == "0" and row["threads"] == "2" and row[column]
        ]
        line(figure, name, *grouped((int(row["s"]), float(row[column])) for row in chosen), colour)
    log_axis(figure, "seqlen")
    figure.update_yaxes(type="log", title="seconds")
    return figure
