"""`bigpool wall`: where 32-bit offsets into a paged KV cache leave 32 bits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any, get_args

import click

from ..errors import ArgumentError
from ..layout import DTYPES, Form, KVLayout, Unit, fault
from ._tables import Sheet, show

SCHEMA = "bigpool-wall/1"
# Sizes of page groups that hybrid models have in practice; 1 is a single layer.
GROUP_SIZES = (1, 5, 8, 16)
FORMS: tuple[Form, ...] = get_args(Form)
FORM_NAMES: Mapping[Form, str] = {"separate": "added one at a time", "summed": "summed in int32"}
FLAGS = {
    "page_size": "--page-size",
    "num_kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "dtype": "--dtype",
    "kv_layout": "--kv-layout",
    "interleaved": "--interleaved",
    "pad": "--pad",
    "inline_scales": "--inline-scales",
}
SHARING = {False: "K and V in a pool each", "page": "K then V in each page", "row": "K then V in each row"}
SIZES = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", 1)},
}


@click.command(
    short_help="Print where 32-bit offsets into a paged KV cache wrap.",
    context_settings={"max_content_width": 100},
)
@click.option("--page-size", metavar="N", help="Tokens in a page. Needed.")
@click.option("--kv-heads", "num_kv_heads", metavar="N", help="KV heads on one device. Needed.")
@click.option("--head-dim", metavar="N", help="Values in a row of K (one token and head). Needed.")
@click.option("--dtype", metavar="NAME", default="bf16", show_default=True, help=f"One of {', '.join(DTYPES)}.")
@click.option("--kv-layout", metavar="NHD|HND", default="NHD", show_default=True, help="Order of tokens and heads in a page.")
@click.option(
    "--interleaved",
    metavar="[page|row]",
    is_flag=False,
    flag_value="page",
    default=None,
    help="K and V share a page: K of all its tokens, then V (page, the bare flag), or a row of K before its row of V.",
)
@click.option("--pad", metavar="N", default="0", show_default=True, help="Elements after each row that hold nothing.")
@click.option("--inline-scales", is_flag=True, help="An fp32 scale follows each row (8-bit and 4-bit dtypes).")
@click.option("--byte-offsets", is_flag=True, help="The kernel computes offsets in bytes, not in elements.")
@click.option(
    "--group-size",
    "group_sizes",
    metavar="N",
    multiple=True,
    help="Layers that share one space of page ids; may be repeated.  [default: 1, 5, 8, 16]",
)
@click.option("--pool", metavar="SIZE", help="Say whether a pool crosses the wall: K and V of those layers, as in 24GiB.")
@click.option("--pages", metavar="N", help="The same, for a pool of N pages.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def wall(
    group_sizes: Sequence[str], pool: str | None, pages: str | None, byte_offsets: bool, as_json: bool, **layout: Any
) -> None:
    """Print where 32-bit offsets into a paged KV cache wrap.

    A page id from an int32 block table times an int32 stride wraps past 2^31-1. Which page fails first depends on how
    a kernel adds up its offsets: added to the pointer one at a time, each product wraps on its own; summed in int32
    first, the sum wraps, up to a page earlier.

    The token is page x page size + slot. A hybrid model whose groups of layers draw page ids from one pool gets there
    with fewer tokens: each token takes a slot in every group.

    \b
    Example:
      bigpool wall --page-size 880 --kv-heads 4 --head-dim 256 --interleaved --group-size 8 --pool 40GiB
    """
    faults: list[str] = []
    kv = _layout(layout, faults)
    layers = [
        _count("--group-size", size, "pass the layers that share one space of page ids, such as 8", faults)
        for size in group_sizes
    ]
    pool_bytes = None if pool is None else _pool_bytes(pool, faults)
    num_pages = None if pages is None else _count("--pages", pages, "pass the pages of the pool", faults)
    if pool is not None and pages is not None:
        faults.append("--pages: expected either --pool or --pages, got both; leave one of them out")
    if faults or kv is None:
        raise ArgumentError("bigpool wall", *faults)
    answer = _answer(kv, "byte" if byte_offsets else "element", layers or GROUP_SIZES, pool_bytes, num_pages)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        _show(kv, answer)


class _Nothing:
    """Stands for an option that was left out."""

    def __repr__(self) -> str:
        return "nothing"


def _number(text: str | None) -> Any:
    """The integer that a text spells, else the text itself, for the error that will name it."""
    if text is None:
        return _Nothing()
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


def _too_long(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]{19,}", text) is not None


def _layout(options: Mapping[str, Any], faults: list[str]) -> KVLayout | None:
    values = dict(options)
    for name in ("page_size", "num_kv_heads", "head_dim", "pad"):
        values[name] = _number(values[name])
    values["interleaved"] = values["interleaved"] or False
    try:
        return KVLayout(**values)
    except ArgumentError as error:
        for text in error.faults:
            name, _, contract = text.partition(": ")
            faults.append(f"{FLAGS[name]}: {contract}")
    return None


def _count(flag: str, text: str, remedy: str, faults: list[str]) -> int:
    number = _number(text)
    if isinstance(number, int) and number > 0:
        return number
    contract = "an integer of at most 18 digits" if _too_long(text) else "an integer of 1 or more"
    faults.append(fault(flag, contract, number, remedy))
    return 1


def _pool_bytes(text: str, faults: list[str]) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", text)
    if match and match[2].lower() in SIZES:
        size = int(Fraction(match[1]) * SIZES[match[2].lower()])
        if size > 0:
            return size
        faults.append(
            fault("--pool", "a size of 1 byte or more", text, "pass the bytes of K and V of all layers that share the page ids")
        )
        return 0
    remedy = "pass the bytes of K and V of all layers that share the page ids"
    faults.append(fault("--pool", "a number and a unit, such as 24GiB or 24GB", text, remedy))
    return 0


def _answer(
    kv: KVLayout, unit: Unit, group_sizes: Sequence[int], pool_bytes: int | None, num_pages: int | None
) -> dict[str, Any]:
    """What `--json` prints; the tables are made from it."""
    walls = {form: kv.wall(form, unit) for form in FORMS}
    groups = []
    for size in group_sizes:
        group: dict[str, Any] = {"group_size": size}
        group["pool_bytes_at_wall"] = {form: kv.pool_bytes(walls[form].num_pages, size) for form in FORMS}
        group["pool"] = None
        if pool_bytes is not None or num_pages is not None:
            pages = num_pages if pool_bytes is None else kv.pages_in(pool_bytes, size)
            assert pages is not None
            group["pool"] = {
                "num_pages": pages,
                "pool_bytes": kv.pool_bytes(pages, size) if pool_bytes is None else pool_bytes,
                "crosses": {form: kv.crosses(pages, form, unit) for form in FORMS},
            }
        groups.append(group)
    strides = {"page": kv.stride_page, "slot": kv.stride_slot, "head": kv.stride_head}
    return {
        "schema": SCHEMA,
        "layout": asdict(kv),
        "strides": {name: {"elements": stride, "bytes": stride * kv.item_bytes} for name, stride in strides.items()},
        "kv_page_bytes": kv.kv_page_bytes,
        "offsets_in": unit,
        "walls": [asdict(walls[form]) for form in FORMS],
        "groups": groups,
    }


def _show(kv: KVLayout, answer: Mapping[str, Any]) -> None:
    row = f"{kv.head_dim}" + (" + fp32 scale" if kv.inline_scales else "") + (f" + {kv.pad} pad" if kv.pad else "")
    dtype = kv.dtype if kv.dtype != "int4" else "int4 (2 in an element)"
    title = f"{dtype} pages of {kv.page_size} tokens x {kv.num_kv_heads} KV heads x {row}, {kv.kv_layout}, "
    title += SHARING[kv.interleaved]

    strides = Sheet(["stride", "elements", "bytes"])
    for name, stride in answer["strides"].items():
        strides.add(name, f"{stride['elements']:,}", f"{stride['bytes']:,}")

    unit = "byte" if answer["offsets_in"] == "byte" else "element"
    walls = Sheet([f"{unit} offsets", "first bad page", "slot", "head", "dim", "token", "byte"], key=1)
    for at in answer["walls"]:
        walls.add(FORM_NAMES[at["form"]], *(f"{at[key]:,}" for key in ("page", "slot", "head", "dim", "token", "byte")))

    pools = Sheet(["layers on one page id", *(f"wall, {name}" for name in FORM_NAMES.values())])
    notes = []
    for group in answer["groups"]:
        size, pool = group["group_size"], group["pool"]
        pools.add(str(size), *(_gib(group["pool_bytes_at_wall"][form]) for form in FORMS))
        if pool:
            text = f"{_layers(size)}, {pool['num_pages']:,} pages, {_gib(pool['pool_bytes'])}: {_verdict(pool)}"
            notes.append((text, "red" if any(pool["crosses"].values()) else "green"))
    show(title, [strides, walls, pools], notes)


def _layers(size: int) -> str:
    return "1 layer" if size == 1 else f"{size} layers"


def _verdict(pool: Mapping[str, Any]) -> str:
    crossed = [FORM_NAMES[form] for form in FORMS if pool["crosses"][form]]
    if not crossed:
        return "stays below the wall"
    if len(crossed) == len(FORMS):
        return "crosses the wall"
    return f"crosses the wall where offsets are {crossed[0]}"


def _gib(size: int) -> str:
    """Rounded up, so that a pool of the size that is shown does reach the wall."""
    return f"{-(-size * 100 // 2**30) / 100:,.2f} GiB"
