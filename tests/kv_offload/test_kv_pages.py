"""In every order of layers, blocks, heads and tokens, a block's pages are its bytes and no others."""

from __future__ import annotations

from itertools import permutations

import pytest

torch = pytest.importorskip("torch")

from sojourn_server.kv_offload.kv_pages import (  # noqa: E402
    KvPages,
    UnsupportedKvCaches,
    merge_neighbours,
    page_views,
)

pytestmark = pytest.mark.filterwarnings("default")  # torch warns about itself

LAYERS, BLOCKS, HEADS, TOKENS, CHANNELS = 3, 5, 2, 4, 6
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CHANNELS}
LAYOUTS = ["".join(each) for each in permutations("LBHNC")]


def layer_views(layout: str, dtype: torch.dtype = torch.int16) -> list[torch.Tensor]:
    """Each layer as vLLM hands it over: dimensions B, H, N, C over memory in the order of ``layout``."""
    memory = torch.zeros([SIZES[axis] for axis in layout], dtype=dtype)
    logical = memory.permute([layout.index(axis) for axis in "LBHNC"])
    return list(logical)


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each.index("B") < each.index("C")])
def test_the_pages_of_a_block_are_its_bytes(layout: str) -> None:
    layers = layer_views(layout)
    inside = layout[layout.index("B") + 1 :]
    if "L" in inside and inside.index("L") > 0:
        # A layer lies within its own heads or tokens: its bytes are not consecutive.
        with pytest.raises(UnsupportedKvCaches, match="without gaps"):
            page_views("layer0", layers[0], BLOCKS)
        return
    for index, layer in enumerate(layers):
        pages = page_views("layer", layer, BLOCKS)
        assert sum(each.shape[1] for each in pages) == HEADS * TOKENS * CHANNELS * 2
        for block in range(BLOCKS):
            for each in pages:
                each[block] = index * BLOCKS + block + 1
    for index, layer in enumerate(layers):
        for block in range(BLOCKS):
            number = index * BLOCKS + block + 1
            assert (layer[block] == number * 257).all(), "a page has bytes of another block or layer"


@pytest.mark.parametrize("kernel_blocks", [1, 2, 4])
def test_kernel_blocks_that_subdivide_a_block_are_one_page(kernel_blocks: int) -> None:
    tokens = TOKENS // kernel_blocks
    cache = torch.zeros(BLOCKS * kernel_blocks, tokens, HEADS, CHANNELS).permute(0, 2, 1, 3)
    (page,) = page_views("layer", cache, BLOCKS)
    assert page.shape == (BLOCKS, HEADS * TOKENS * CHANNELS * 4)
    page[3] = 255
    filled = (cache.view(torch.int32) == -1).flatten(1).all(1).nonzero().flatten().tolist()
    assert filled == list(range(3 * kernel_blocks, 4 * kernel_blocks))


def test_pages_begin_where_the_tensor_does() -> None:
    memory = torch.zeros(7 + BLOCKS * 8, dtype=torch.uint8)
    (page,) = page_views("layer", memory[7:].view(BLOCKS, 8), BLOCKS)
    page[:] = 1
    assert memory.tolist() == [0] * 7 + [1] * BLOCKS * 8


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(BLOCKS + 1, 4), "expected 5 blocks"),
        (torch.zeros(BLOCKS, 4, 8)[:, :, ::2], "without gaps"),
        (torch.zeros(BLOCKS, 1, 4).expand(BLOCKS, 3, 4), "without gaps"),
        (torch.zeros(64).as_strided((BLOCKS, 8), (4, 1)), "overlap"),
        (torch.zeros(0, 4), "expected 5 blocks"),
    ],
)
def test_other_tensors_are_refused(cache: torch.Tensor, message: str) -> None:
    with pytest.raises(UnsupportedKvCaches, match=message):
        page_views("layer7", cache, BLOCKS)


def test_layers_interleaved_within_a_block_become_one_page() -> None:
    layers = layer_views("BLHNC")
    pages = [
        KvPages(view.data_ptr(), view.stride(0), view.shape[1])
        for layer in layers
        for view in page_views("layer", layer, BLOCKS)
    ]
    (merged,) = merge_neighbours(pages)
    assert merged == KvPages(
        layers[0].data_ptr(), pages[0].stride_bytes, sum(each.page_bytes for each in pages)
    )


def test_layers_that_lie_apart_stay_apart() -> None:
    pages = [KvPages(0, 64, 64), KvPages(640, 64, 64), KvPages(1000, 128, 32)]
    assert merge_neighbours(pages) == pages
    # Neighbours in memory whose blocks would overlap the next block's are no neighbours within a block.
    assert len(merge_neighbours([KvPages(0, 64, 64), KvPages(64, 64, 64)])) == 2
