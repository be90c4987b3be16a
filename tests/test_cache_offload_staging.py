"""Groups and the staging buffer: which layers go together, where their bytes lie, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.geometry import CacheConfig, Geometry, InvalidConfig, LayerGeometry, Reach, Unsupported
from cache.offload.groups import BORROWED, EngineGroup, Groups, InvalidGroups, LayerKv, pointer_table
from cache.offload.staging import ALIGNMENT, BlockIds, PlainStaging, Staging, gpu_direct
from cache.pool import CpuPool

CPU = torch.device("cpu")
BOTH = ("keys", "values")
BF16 = torch.bfloat16


def layer(index: int, heads: int = 2, dim: int = 64, dtype: torch.dtype = BF16, **more: int) -> LayerKv:
    return LayerKv(index, BOTH, heads, dim, dtype, **more)


MIXED = Geometry(
    (
        LayerGeometry(2, 8, 8),
        LayerGeometry(2, 8, 8, Reach("window", 8)),
        LayerGeometry(2, 8, 8),
        LayerGeometry(1, 12, 4),
        LayerGeometry(1, 3, 3, Reach("chunk", 24)),
    )
)


# --- kernel groups ------------------------------------------------------------------------------------------------


def test_layers_of_equal_geometry_form_a_group_numbered_by_their_lowest_layer_g1_g2() -> None:
    layers = [layer(index, dim=64 if index % 2 == 0 else 128) for index in (4, 1, 0, 5, 2, 3)]
    groups = Groups(layers, 16).kernel_groups
    assert [group.layers for group in groups] == [(0, 2, 4), (1, 3, 5)]
    assert [group.hidden for group in groups] == [128, 256]


@pytest.mark.parametrize(
    "other",
    [
        layer(1, heads=4),
        layer(1, dim=128),
        layer(1, dtype=torch.float16),
        layer(1, engine_group=1),
        layer(1, slots_per_block=2),
        LayerKv(1, ("keys",), 2, 64, BF16),
    ],
)
def test_any_difference_makes_another_group_g1(other: LayerKv) -> None:
    assert len(Groups([layer(0), other], 16).kernel_groups) == 2


def test_a_layer_that_borrows_its_kv_belongs_to_no_group_g3() -> None:
    groups = Groups([layer(0), layer(1, engine_group=BORROWED), layer(2)], 16).kernel_groups
    assert [group.layers for group in groups] == [(0, 2)]
    with pytest.raises(InvalidGroups, match="no layer stores"):
        Groups([layer(0, engine_group=BORROWED)], 16)


def test_descriptors_must_match_the_groups_one_to_one_g4() -> None:
    layers = [layer(0), layer(1, dim=8)]
    with pytest.raises(ValueError, match="1 engine groups describe 2 kernel groups"):
        Groups(layers, 16, engine_groups=[EngineGroup((0, 1))])
    with pytest.raises(ValueError, match=r"engine group 0 has layers \(1,\)"):
        Groups(layers, 16, engine_groups=[EngineGroup((1,)), EngineGroup((0,))])


def test_pointer_tables_hold_all_keys_before_all_values_g5() -> None:
    geometry = Geometry((LayerGeometry(2, 8, 8), LayerGeometry(1, 12, 4), LayerGeometry(2, 8, 8)))
    pool = CpuPool(geometry, CacheConfig(8, 4, torch.float32))
    tables = [
        pointer_table(pool, group, CPU).tolist() for group in Groups.of(geometry, torch.float32, 16).kernel_groups
    ]
    assert tables[0] == [tensors[index].data_ptr() for tensors in (pool.keys, pool.values) for index in (0, 2)]
    assert tables[1:] == [[pool.keys[1].data_ptr()], [pool.values[1].data_ptr()]]


def test_a_pool_whose_k_and_v_differ_in_width_has_a_group_for_each_side() -> None:
    groups = Groups.of(MIXED, torch.float32, 16).kernel_groups
    assert [(group.layers, group.sides, group.hidden) for group in groups] == [
        ((0, 2), BOTH, 16),
        ((1,), BOTH, 16),
        ((3,), ("keys",), 12),
        ((3,), ("values",), 4),
        ((4,), BOTH, 3),
    ]


# --- ratio, windows -----------------------------------------------------------------------------------------------


def test_a_compressed_group_takes_half_the_slots_and_half_the_bytes_c3() -> None:
    plain = Groups([layer(0)], 256)
    packed = Groups([layer(0, slots_per_block=8)], 256, engine_groups=[EngineGroup((0,), tokens_per_block=16)])
    assert packed.kernel_groups[0].ratio == 2
    assert packed.slots_per_chunk(0) == 128
    assert packed.cache_size_per_token() * 2 == plain.cache_size_per_token()
    unknown = Groups([layer(0, slots_per_block=8)], 256, engine_groups=[EngineGroup((0,), tokens_per_block=0)])
    assert unknown.kernel_groups[0].ratio == 1


@pytest.mark.parametrize(
    ("slots", "engine", "message"),
    [
        (3, EngineGroup((0,), 16), "no multiple of its 3 slots"),
        (8, EngineGroup((0,), 48), "a chunk of 256 tokens is no multiple of 48"),
        (8, EngineGroup((0,), 16, window=40), "a window of 40 tokens is no multiple of 16 a block"),
        (8, EngineGroup((0,), 16, window=0), "a window of 0 tokens"),
        (0, EngineGroup((0,), 16), "16 tokens in 0 slots"),
        (8, EngineGroup((0,), -1), "-1 tokens in 8 slots"),
    ],
)
def test_blocks_windows_and_chunks_that_do_not_divide_are_refused_c2(
    slots: int, engine: EngineGroup, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Groups([layer(0, slots_per_block=slots)], 256, engine_groups=[engine])


@pytest.mark.parametrize(
    ("window", "full", "slots"),
    [(None, False, 256), (128, False, 128), (256, False, 256), (1000, False, 256), (128, True, 256)],
)
def test_a_short_window_keeps_the_tail_unless_told_otherwise_w1_w2_w3(
    window: int | None, full: bool, slots: int
) -> None:
    groups = Groups([layer(0)], 256, engine_groups=[EngineGroup((0,), window=window)], full_windows=full)
    assert groups.slots_per_chunk(0) == slots
    rows = groups.rows_of(0, torch.arange(256))
    assert rows.tolist() == list(range(256 - slots, 256))


def test_rows_must_be_those_of_one_whole_chunk() -> None:
    with pytest.raises(ValueError, match="15 rows for kernel group 0: a chunk of it has 16"):
        Groups([layer(0)], 16).rows_of(0, torch.arange(15))


# --- object groups ------------------------------------------------------------------------------------------------


def windows(*sizes: int | None, separate: bool = True, full_windows: bool = False) -> Groups:
    layers = [layer(index, engine_group=index) for index in range(len(sizes))]
    engine = [EngineGroup((index,), window=size) for index, size in enumerate(sizes)]
    return Groups(layers, 64, engine_groups=engine, separate=separate, full_windows=full_windows)


def test_object_groups_are_buckets_of_equal_reach_in_chunks_o1_o2() -> None:
    groups = windows(32, None, 64, 65, 128, None).object_groups
    assert [(group.kernel_groups, group.window_chunks) for group in groups] == [
        ((0, 2), 1),
        ((1, 5), None),
        ((3, 4), 2),
    ]
    for whole in (windows(32, None, separate=False), windows(32, None, full_windows=True)):
        assert [(group.kernel_groups, group.window_chunks) for group in whole.object_groups] == [((0, 1), None)]


def test_a_windowed_group_needs_the_last_chunks_before_the_hit_only_o3() -> None:
    groups = windows(None, 128)
    full = [1, 1, 1, 1, 0]
    assert groups.usable_chunks(np.array([full, [1, 1, 1, 1, 1]]).T) == 4
    assert groups.usable_chunks(np.array([full, [0, 0, 1, 1, 0]]).T) == 4
    assert groups.usable_chunks(np.array([full, [1, 1, 0, 1, 0]]).T) == 2
    assert groups.usable_chunks(np.array([full, [0, 1, 0, 1, 1]]).T) == 0


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=8))
def test_usable_chunks_equals_probing_downward_o3(has: list[list[bool]]) -> None:
    groups = windows(None, 64, 160)
    reach = [group.window_chunks for group in groups.object_groups]
    assert reach == [None, 1, 3]

    def serves(n: int) -> bool:
        return all(
            has[chunk][group]
            for group, needed in enumerate(reach)
            for chunk in range(0 if needed is None else max(0, n - needed), n)
        )

    assert groups.usable_chunks(has) == next(n for n in range(len(has), -1, -1) if serves(n))


# --- the staging buffer -------------------------------------------------------------------------------------------


@pytest.fixture
def staging() -> Staging:
    return Staging(Groups.of(MIXED, BF16, 16), CPU, max_batch_size=3)


def every_view(staging: Staging) -> list[torch.Tensor]:
    indices = range(len(staging.groups.kernel_groups))
    return [staging.kernel_group(slot, index) for slot in range(staging.max_batch_size) for index in indices]


def test_views_are_typed_contiguous_and_of_the_groups_shape_s4(staging: Staging) -> None:
    shapes = [list(view.shape) for view in every_view(staging)[:5]]
    assert shapes == [[2, 2, 16, 16], [2, 1, 8, 16], [1, 1, 16, 12], [1, 1, 16, 4], [2, 1, 16, 3]]
    assert all(view.is_contiguous() and view.dtype == BF16 for view in every_view(staging))
    assert staging.kernel_group(1, 2).data_ptr() == staging.kernel_group(1, 2).data_ptr()


def test_every_region_begins_at_256_bytes_s8(staging: Staging) -> None:
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in every_view(staging))
    odd = Groups([layer(0, 1, 3, torch.uint8), layer(1, 1, 5, torch.float32), layer(2, 1, 1, torch.int64)], 1)
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in every_view(Staging(odd, CPU)))


def test_no_two_regions_overlap_and_writing_one_alters_no_other_s6(staging: Staging) -> None:
    views = every_view(staging)
    for number, view in enumerate(views):
        view.fill_(number)
    assert all(bool((view == number).all()) for number, view in enumerate(views))


def test_an_object_begins_at_its_first_group_and_is_the_sum_of_its_members_s6(staging: Staging) -> None:
    groups = staging.groups
    for slot in range(staging.max_batch_size):
        ends = []
        for group in groups.object_groups:
            flat = staging.object_group(slot, group.index)
            first = staging.kernel_group(slot, group.kernel_groups[0])
            assert flat.data_ptr() == first.data_ptr()
            sizes = [groups.kernel_groups[index].chunk_bytes for index in group.kernel_groups]
            assert flat.numel() == sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
            ends += [flat.data_ptr(), flat.data_ptr() + flat.numel()]
        assert ends[1:-1:2] == ends[2::2], "objects of a slot lie back to back"
        assert staging.chunk(slot).data_ptr() == ends[0]
        assert staging.chunk(slot).numel() == staging.chunk_bytes == ends[-1] - ends[0]


def test_bytes_written_through_kernel_views_appear_in_the_object_s6(staging: Staging) -> None:
    view = staging.kernel_group(2, 3)
    view.copy_(torch.randn(view.shape).to(BF16))
    group = next(group for group in staging.groups.object_groups if 3 in group.kernel_groups)
    flat = staging.object_group(2, group.index)
    start = view.data_ptr() - flat.data_ptr()
    size = view.numel() * 2
    assert torch.equal(flat[start : start + size].view(BF16), view.reshape(-1))
    assert int(flat[start + size : start - (-size // ALIGNMENT) * ALIGNMENT].sum()) == 0, "gaps stay zero"


@pytest.mark.parametrize(("slot", "group"), [(3, 0), (-1, 0), (0, 5), (0, -1)])
def test_a_slot_or_group_outside_the_buffer_is_refused_naming_both_s5(staging: Staging, slot: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"Invalid batch slot {slot} or kernel group {group}"):
        staging.kernel_group(slot, group)
    with pytest.raises(ValueError, match=f"Invalid batch slot {slot} or object group {group}"):
        staging.object_group(slot, group)


def test_a_chunk_outside_the_buffer_is_refused(staging: Staging) -> None:
    with pytest.raises(ValueError, match="Invalid batch slot 3"):
        staging.chunk(3)
    with pytest.raises(InvalidConfig, match="max_batch_size is 0"):
        Staging(staging.groups, CPU, max_batch_size=0)


def test_shapes_are_asked_for_whole_chunks_and_scale_the_slots_s5(staging: Staging) -> None:
    groups = staging.groups
    assert groups.shape_dtype(48, 1) == (torch.Size((2, 1, 24, 16)), BF16)
    with pytest.raises(ValueError, match=r"num_tokens \(17\) must be a multiple of chunk_tokens \(16\)"):
        groups.shape_dtype(17, 0)
    with pytest.raises(ValueError, match="kernel group 9: there are 5"):
        groups.shape_dtype(16, 9)
    with pytest.raises(ValueError, match="a chunk of 0 tokens"):
        Groups([layer(0)], 0)


def test_cache_size_per_token_is_a_chunks_bytes_over_its_tokens_s7() -> None:
    assert Groups.of(MIXED, BF16, 16, full_windows=True).cache_size_per_token() == MIXED.bytes_per_cell(BF16)
    tail_saves = 8 * 2 * 16 * 2  # 8 slots x K and V x 16 elements x 2 bytes
    expected = (MIXED.bytes_per_cell(BF16) * 16 - tail_saves) // 16
    assert Groups.of(MIXED, BF16, 16).cache_size_per_token() == expected


# --- GPUDirect, block ids, the plain twin -------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def register(self, buffer: torch.Tensor) -> None:
        self.events.append(("register", buffer.data_ptr()))

    def deregister(self, buffer: torch.Tensor) -> None:
        self.events.append(("deregister", buffer.data_ptr()))


def test_the_buffer_is_registered_with_gpu_direct_and_taken_back_once() -> None:
    direct = Recorder()
    staging = Staging(Groups.of(MIXED, BF16, 16), CPU, direct=direct)
    staging.close()
    staging.close()
    address = staging.buffer.data_ptr()
    assert direct.events == [("register", address), ("deregister", address)]


def test_gpu_direct_is_refused_by_name_where_it_is_absent() -> None:
    with pytest.raises(Unsupported, match="GPUDirect Storage by 'cufile' is not available"):
        gpu_direct("cufile")


def test_block_ids_are_disjoint_views_of_one_buffer_b1_b2() -> None:
    ids = BlockIds(CPU, capacity=6)
    first, empty, last = ids.stage([[5, 6], [], torch.tensor([7, 8, 9, 10])])
    assert (first.tolist(), empty.tolist(), last.tolist()) == ([5, 6], [], [7, 8, 9, 10])
    assert last.data_ptr() - first.data_ptr() == 2 * 8
    with pytest.raises(ValueError, match="7 block ids do not fit the buffer of 6"):
        ids.stage([[1] * 7])
    assert first.tolist() == [5, 6], "a refusal uploads nothing"
    assert ids.stage([]) == []


def test_the_plain_twin_stages_one_tensor() -> None:
    kv = torch.arange(2 * 3 * 8 * 4.0).view(2, 3, 8, 4)
    plain = PlainStaging(kv, chunk_tokens=4)
    assert plain.shape(5) == (2, 3, 5, 4)
    assert plain.buffer(4).is_contiguous()
    part = plain.buffer(3)
    part.copy_(plain.slice_tokens(2, 5))
    assert torch.equal(plain.buffer(4)[:, :, :3], kv[:, :, 2:5])
    with pytest.raises(ValueError, match="5 tokens do not fit the buffer of 4"):
        plain.buffer(5)
    for wrong in (kv[0], kv[:1]):
        with pytest.raises(ValueError, match="expected K/V of shape"):
            PlainStaging(wrong)
