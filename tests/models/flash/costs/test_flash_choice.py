"""Whether the swarm gains by more blocks on flash."""

from __future__ import annotations

import pytest

from swarm.models.flash.costs.flash_choice import choose


def test_flash_never_pays_if_everything_fits():
    assert not choose(8, 8, memory_s=8.0, flash_s=0.008, hop_s=1.0).flash


def test_flash_is_all_there_is_if_nothing_fits():
    assert choose(8, 0, memory_s=0.008, flash_s=8.0, hop_s=0.001).flash


@pytest.mark.parametrize(("flash_s", "pays"), [(0.16, True), (0.25, True), (0.27, False)])
def test_flash_pays_if_a_token_is_no_slower_than_through_more_servers(flash_s, pays):
    # 16 blocks in the memory of two servers: 160 ms and a hop of 100 ms.
    choice = choose(16, 8, memory_s=0.160, flash_s=flash_s, hop_s=0.1)
    assert choice.flash is pays
    assert "260 ms in the memory of 2 servers" in choice.reason
