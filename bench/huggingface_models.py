"""Which Hugging Face model types work with attn_implementation="tessera", for the transformers that is installed.

Every model type of python/tests/models.py is made with random weights, tiny, once with eager attention and once with
Tessera's, and python/tests/test_models.py says what is compared. One row a type, one column a check:

  yes, or left, right       as eager: outputs within 1e-4 of the largest value in float32, gradients within 1e-3;
                            padding on these sides
  -                         does not apply: the model has no padding, does not generate, has no static cache
  mixed, as eager           packed sequences see each other: the model does not tell them apart
  eager fails               there is nothing to compare with
  WRONG, refused            another result than eager's; an error that says why there is none
  mask of elements          whether masks of seqlen x seqlen are made, as eager's are; QuadraticMaskWarning says so
  refused                   ValueError when the model is made, or NotImplementedError when it is called

Needs torch, transformers, pytest and the tessera package. Runs on the CPU, half a minute of one core.
"""

import argparse
import pathlib
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench/huggingface_models.py -->", "<!-- end -->"
KINDS = ("decoder", "encoder", "encoder-decoder", "vision", "speech", "multimodal")


def cell(pair, check, tests):
    """What the table says of one check."""
    try:
        return check(pair)
    except tests.EagerFails:
        return "eager fails"
    except tests.Wrong as wrong:
        return f"WRONG: {wrong}"
    except Exception as error:
        return "refused" if isinstance(error, (NotImplementedError, ValueError)) else f"raises {type(error).__name__}"


def why(refusal):
    """A refusal in few words."""
    reason = refusal.partition("AttentionInterface (")[2].partition(")")[0]
    own, found, _ = reason.partition(" is an attention of its own")
    if found:
        return f"refused: own attention ({own})"
    return "refused: " + (reason or refusal.partition(":")[0].partition(",")[0])


def row(model, tests, hf):
    """Cells after the type: kind, checks, masks, what else to know."""
    if not model.there:
        return None
    if model.refused:
        said = tests.refusal(model)
        note = "WRONG: not refused" if said is None else why(said)
        return [model.kind, *[""] * len(tests.CHECKS), "", note]
    try:
        pair = tests.Pair(model)
    except Exception as error:
        return [model.kind, *[""] * len(tests.CHECKS), "", f"cannot be made: {type(error).__name__}"]
    cells = [cell(pair, check, tests) for check in tests.CHECKS.values()]
    note = "some layers have an attention of their own" if hf.OwnAttentionWarning in pair.warned else ""
    return [model.kind, *cells, "yes" if hf.QuadraticMaskWarning in pair.warned else "no", note]


def table(rows, header):
    lines = ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def write(path, text):
    """Between the two comments of a Markdown file."""
    before, found, rest = path.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        sys.exit(f"{path} has no lines {BEGIN} and {END} to write between")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="model types; all of them if none is given")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default: 0)")
    parser.add_argument("--write", metavar="FILE", type=pathlib.Path,
                        help=f"rewrite the table in this Markdown file, between {BEGIN} and {END}")
    arguments = parser.parse_args()

    sys.path.insert(0, str(ROOT / "python/tests"))
    import torch
    import transformers

    import models
    import tessera.transformers as hf
    import test_models as tests

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    unknown = set(arguments.models) - {model.name for model in models.MODELS}
    if unknown:
        parser.error(f"unknown model types: {', '.join(sorted(unknown))}")
    chosen = [model for model in models.MODELS if not arguments.models or model.name in arguments.models]
    chosen.sort(key=lambda model: (KINDS.index(model.kind), model.name))
    rows, missing = [], []
    for i, model in enumerate(chosen):
        print(f"{i + 1}/{len(chosen)} {model.name}", file=sys.stderr, flush=True)
        torch.manual_seed(arguments.seed)
        cells = row(model, tests, hf)
        if cells is None:
            missing.append(model.name)
        else:
            rows.append([model.name, *cells])
    refused = sum(cells[-1].startswith("refused") for cells in rows)
    partly = [cells[0] for cells in rows if "refused" in cells]
    bad = [cells[0] for cells in rows if any("WRONG" in x or "raises" in x or "cannot" in x for x in cells)]
    text = f"transformers {transformers.__version__}, torch {torch.__version__}, CPU, float32:\n"
    text += f"{len(rows)} model types, {refused} of them refused"
    for number, what in ((partly, "refused in part"), (bad, "with something wrong")):
        text += f", {len(number)} {what}" + (f" ({'; '.join(number)})" if number else "")
    text += f"; {len(missing)} are not in this version" + (f" ({'; '.join(missing)})" if missing else "") + ".\n\n"
    text += table(rows, ["model type", "kind", *tests.CHECKS, "mask of elements", "note"])
    print(text)
    if arguments.write is not None:
        write(arguments.write, text)


if __name__ == "__main__":
    main()
