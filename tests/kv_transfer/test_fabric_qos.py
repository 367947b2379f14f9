"""Printed settings for a fabric: the paper's figures, and no word that they have been tried."""

from __future__ import annotations

from sojourn_server.cli import build_app
from sojourn_server.kv_transfer.fabric_qos import (
    BANDWIDTH_PERCENT,
    DSCP,
    KV_LANE,
    VIRTUAL_LANES,
    infiniband_settings,
    roce_settings,
)
from typer.testing import CliRunner


def test_infiniband_has_the_papers_figures() -> None:
    lines = infiniband_settings().splitlines()
    assert "NOT VERIFIED ON HARDWARE" in lines[0]
    for line in (
        "qos_max_vls 4",
        "qos_high_limit 240",
        "qos_vlarb_high 0:192,1:192,2:0,3:192",
        "qos_vlarb_low 0:192,1:192,2:64,3:192",
    ):
        assert line in lines
    assert "qos_sl2vl 0,1,2,3,0,1,2,3,0,1,2,3,0,1,2,3" in lines


def test_kv_has_a_lane_of_its_own_with_the_least_of_it() -> None:
    assert VIRTUAL_LANES[KV_LANE].use == "KV"
    assert VIRTUAL_LANES[KV_LANE].high == 0
    assert BANDWIDTH_PERCENT[KV_LANE] == 1
    assert sum(BANDWIDTH_PERCENT.values()) == 100
    assert len(set(DSCP.values())) == len(VIRTUAL_LANES)
    assert all(0 <= point < 64 for point in DSCP.values())
    assert f"export UCX_IB_SL={KV_LANE}" in infiniband_settings()
    assert f"export UCX_IB_TRAFFIC_CLASS={DSCP[KV_LANE] * 4}" in roce_settings()


def test_roce_says_whose_figures_they_are() -> None:
    text = roce_settings()
    assert "NOT VERIFIED ON HARDWARE" in text.splitlines()[0]
    assert "Code points and percentages are ours" in text
    assert "mlnx_qos -i DEVICE --pfc 1,1,1,1,0,0,0,0" in text
    assert "--tcbw 33,33,1,33,0,0,0,0" in text


def test_the_doctor_prints_them_and_checks_nothing() -> None:
    result = CliRunner().invoke(build_app(), ["doctor", "--fabric"])
    assert result.exit_code == 0
    assert result.output.count("NOT VERIFIED ON HARDWARE") == 2
    assert "qos_vlarb_low 0:192,1:192,2:64,3:192" in result.output
    assert "python" not in result.output
