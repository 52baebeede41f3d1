"""The dashboard and the alert rules of docs/monitoring, against a real Prometheus that scrapes two sessions during faults."""

import json
import re
import subprocess

import pytest
from monitoring import DASHBOARD, ROOT, RULES, Pair, Prometheus, eventually, filled, panels, program
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import parser

needs_prometheus = pytest.mark.skipif(
    not program("promtool"),
    reason="no Prometheus: install Debian's prometheus, or name the program with PROMETHEUS",
)

# Units of panels, as Grafana names them.
UNITS = {"Bps", "bytes", "ops", "percentunit", "s", "short"}

# Alerts that the sessions below give no cause for. Most of the others depend on how busy the machine is.
NEVER = {"TcpxConnectionsFlap", "TcpxPluginNotUsed", "TcpxSameHostNotUsed", "TcpxSlotsShort"}


def promtool(*args, **options):
    ran = subprocess.run([program("promtool"), *args], capture_output=True, text=True, timeout=60, **options)
    return ran.returncode, ran.stdout + ran.stderr


def test_the_dashboard_is_what_grafana_takes():
    dashboard = json.loads(DASHBOARD.read_text())
    everything = dashboard["panels"]
    assert dashboard["id"] is None and dashboard["uid"] and dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in everything]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert "datasource" in variables
    cells = set()
    for panel in everything:
        place = panel["gridPos"]
        own = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert max(x for x, _ in own) < 24 and not own & cells, panel["title"]
        cells |= own
    for panel in panels():
        assert panel["title"] and panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"].get("unit", "short") in UNITS
        targets = panel["targets"]
        assert targets and len({target["refId"] for target in targets}) == len(targets)
        for target in targets:
            assert target["datasource"] == panel["datasource"]
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used - {"__rate_interval"} <= variables, target["expr"]
            # The peer that stands for all that are gone would show as a burst.
            assert 'peer=~"$peer"' in target["expr"] or "tcpx_slot_waits" in target["expr"], target["expr"]
    assert {"all": variable.get("allValue") for variable in dashboard["templating"]["list"] if variable["name"] == "peer"} == {"all": ".+"}


def test_rules_name_settings_that_exist():
    settings = set(re.findall(r"`(TCPX_\w+)`", (ROOT / "docs" / "operations.md").read_text()))
    named = set(re.findall(r"TCPX_\w+", RULES.read_text()))
    assert named and named <= settings


@needs_prometheus
def test_prometheus_takes_the_files():
    assert promtool("check", "config", ROOT / "docs" / "monitoring" / "prometheus.yml")[0] == 0
    code, said = promtool("check", "rules", RULES)
    assert code == 0, said


# For each alert: series before and after the fault, a minute apart. It must fire after and not before.
PEER = 'job="tcpx",instance="a:1",session="alice",peer="bob"'
LANE = f'{PEER},lane="0",local="10.0.0.1",remote="10.0.0.2"'
CASES = {
    "TcpxTransfersFailing": {f'tcpx_transfers_failed_total{{{PEER},cause="disconnected"}}': "0x30 1x30"},
    "TcpxDown": {'up{job="tcpx",instance="a:1"}': "1x30 0x30"},
    "TcpxStalled": {
        f"tcpx_lane_in_flight_bytes{{{LANE}}}": "1000x60",
        f'tcpx_bytes_total{{{PEER},path="stream",direction="sent",initiator="self"}}': "0+1000x30 30000x30",
        # What peers move does not help.
        f'tcpx_bytes_total{{{PEER},path="stream",direction="sent",initiator="peer"}}': "0+1000x60",
    },
    "TcpxWaitsForPeer": {
        f"tcpx_transfers_in_flight{{{PEER}}}": "1x60",
        f"tcpx_connections_total{{{PEER}}}": "1x60",
        f"tcpx_connected{{{PEER}}}": "1x30 0x30",
    },
    "TcpxConnectionsFlap": {f"tcpx_connections_lost_total{{{PEER}}}": "1x30 2+1x30"},
    "TcpxLaneLost": {f"tcpx_lanes_lost_total{{{PEER}}}": "7x30 8x30"},
    "TcpxLaneDown": {f"tcpx_lane_up{{{LANE}}}": "1x30 0x30"},
    "TcpxSameHostNotUsed": {
        f'tcpx_peer_info{{{PEER},transport="tcp",same_host="impossible"}}': "1x60",
        f'tcpx_bytes_total{{{PEER},path="stream",direction="sent",initiator="self"}}': "0x30 0+1000x30",
    },
    "TcpxPluginNotUsed": {
        f'tcpx_peer_info{{{PEER},transport="plugin",same_host="other_host"}}': "1x60",
        f"tcpx_connected{{{PEER}}}": "1x60",
        f'tcpx_bytes_total{{{PEER},path="plugin",direction="sent",initiator="self"}}': "0+1000x30 30000x30",
        f'tcpx_bytes_total{{{PEER},path="stream",direction="sent",initiator="self"}}': "0+10x60",
    },
    "TcpxRetransmits": {
        f'tcpx_lane_wire_bytes_total{{{LANE},direction="sent"}}': "0+1448000x60",
        f"tcpx_lane_retransmits_total{{{LANE}}}": "0x30 0+2x30",
    },
    "TcpxReceiverLimited": {
        f"tcpx_lane_busy_seconds_total{{{LANE}}}": "0+50x60",
        f"tcpx_lane_receiver_limited_seconds_total{{{LANE}}}": "0+1x30 30+25x30",
    },
    "TcpxSendBufferLimited": {
        f"tcpx_lane_busy_seconds_total{{{LANE}}}": "0+50x60",
        f"tcpx_lane_buffer_limited_seconds_total{{{LANE}}}": "0+1x30 30+25x30",
    },
    "TcpxSlotsShort": {
        'tcpx_slot_waits_total{job="tcpx",instance="a:1",session="alice"}': "0+1x30 30+50x30",
        f'tcpx_chunks_total{{{PEER},path="staged",direction="sent",initiator="self"}}': "0+100x60",
    },
    "TcpxApplicationBehind": {f'tcpx_waits_total{{{PEER},for="room"}}': "5x30 6+1x30"},
    "TcpxSlowSmallTransfers": {
        f'tcpx_transfer_duration_seconds_bucket{{{PEER},size="4KiB",le="0.065536"}}': "0+100x30 3000+90x30",
        f'tcpx_transfer_duration_seconds_bucket{{{PEER},size="4KiB",le="0.524288"}}': "0+100x60",
        f'tcpx_transfer_duration_seconds_bucket{{{PEER},size="4KiB",le="+Inf"}}': "0+100x60",
    },
}


@needs_prometheus
def test_each_alert_fires_for_its_fault_and_not_before(tmp_path):
    alerts = re.findall(r"(?m)^ +- alert: (\w+)$", RULES.read_text())
    assert sorted(CASES) == sorted(alerts)

    def firing(minutes, *names):
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names]
        return {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": minutes, "exp_samples": samples}

    cases = [
        {
            "interval": "1m",
            "name": alert,
            "input_series": [{"series": series, "values": values} for series, values in inputs.items()],
            "promql_expr_test": [firing("29m"), firing("55m" if "Lost" not in alert and "Failing" not in alert else "33m", alert)],
        }
        for alert, inputs in CASES.items()
    ]
    test = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "test.yml").write_text(json.dumps(test))
    code, said = promtool("test", "rules", tmp_path / "test.yml")
    assert code == 0, said


class Families:
    """What a session says, for the library that writes Prometheus' own format, which promtool reads."""

    def __init__(self, text):
        self.text = text

    def collect(self):
        return parser.text_string_to_metric_families(self.text)


@needs_prometheus
def test_faults_are_seen(tmp_path):
    with Pair() as pair, Prometheus(tmp_path, pair.ports) as prometheus:
        code, said = check_metrics(pair.alice)
        assert code == 0, said

        # Before the faults.
        scraped = "count(count by (instance) (count_over_time(tcpx_bytes_total[1m]) > 4)) == 2"
        eventually(lambda: prometheus.query(scraped), "scrapes of both")
        alerts, stats = prometheus.alerts(), pair.stats()
        assert not NEVER & alerts.keys()
        # A machine that stands still for seconds may cause these.
        assert "TcpxLaneLost" not in alerts or stats["lanes_lost"]
        assert "TcpxTransfersFailing" not in alerts or stats["failed"]

        # A lane is reset: the connection and its transfers go on.
        before = pair.stats()
        pair.reset_lane()
        sides = eventually(lambda: prometheus.alerts().get("TcpxLaneLost"), "TcpxLaneLost")
        assert {(side["labels"]["session"], side["labels"]["peer"]) for side in sides} <= {("alice", "bob"), ("bob", "alice")}
        eventually(lambda: pair.stats()["lanes_rejoined"] > before["lanes_rejoined"], "the lane")
        assert "TcpxTransfersFailing" not in prometheus.alerts() or pair.stats()["failed"]

        check_expressions(prometheus)

        # The peer is killed.
        pair.kill()
        failing = dict(session="alice", peer="bob", cause="disconnected")
        eventually(lambda: fires(prometheus, "TcpxTransfersFailing", **failing), "TcpxTransfersFailing")
        bob = f"127.0.0.1:{pair.ports[1]}"
        eventually(lambda: fires(prometheus, "TcpxDown", instance=bob), "TcpxDown")


def fires(prometheus, name, **labels):
    """Whether an alert with these labels fires."""
    alerts = prometheus.alerts().get(name, [])
    return any(labels.items() <= alert["labels"].items() for alert in alerts)


def check_metrics(session):
    """Has promtool look at names and units."""
    registry = CollectorRegistry()
    registry.register(Families(session.metrics()))
    return promtool("check", "metrics", input=generate_latest(registry).decode())


def check_expressions(prometheus):
    """Each expression of the dashboard gives data; rules are evaluated, on metrics that are there."""
    for panel in panels():
        for target in panel["targets"]:
            # A scrape that comes too late leaves a gap.
            expression = filled(target["expr"])
            eventually(lambda: prometheus.query(expression), f"data of {panel['title']}: {expression}")
    names = set(prometheus.get("label/__name__/values"))
    for rule in prometheus.rules():
        assert rule["health"] == "ok", rule
        assert set(re.findall(r"\btcpx_\w+", rule["query"])) <= names, rule["query"]
        assert {"summary", "cause", "remedy"} == rule["annotations"].keys(), rule["name"]
        assert rule["labels"]["severity"] in ("page", "ticket")
