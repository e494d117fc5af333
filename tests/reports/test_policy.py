"""Claims about policies: readable in one screen, strict, and found by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.records.errors import UserError
from halfbyte.reports.policy import load_policy, shipped_policies


def test_every_shipped_policy_loads_under_its_name_and_fits_a_screen() -> None:
    assert set(shipped_policies()) >= {"release", "smoke"}
    for name, text in shipped_policies().items():
        assert load_policy(name).name == name
        assert len(text.splitlines()) <= 24


def test_the_release_policy_allows_no_limit_and_the_smoke_policy_is_no_evidence() -> None:
    release, smoke = load_policy("release"), load_policy("smoke")
    assert release.release_evidence
    assert not smoke.release_evidence
    with pytest.raises(UserError, match="was cut to 100 questions"):
        release.refuse_limit("mmlu", 100)
    release.refuse_limit("mmlu", None)
    smoke.refuse_limit("mmlu", 100)


def test_an_unknown_policy_names_the_nearest_and_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown policy 'relaese'.*did you mean 'release'.*known: image, lossless"):
        load_policy("relaese")


def test_a_policy_is_found_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(shipped_policies()["release"].replace("margins: {}", "margins: {gsm8k: 0.02}"), encoding="utf-8")
    policy = load_policy(str(path))
    assert policy.margin_of("gsm8k", "exact_match", (0, 1)) == 0.02
    assert policy.margin_of("mmlu", "acc", (0, 1)) == 0.01


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("margin: 0.01", "margn: 0.01", "unknown field of a policy 'margn'.*did you mean 'margin'"),
        ("margin: 0.01", "margin: -0.01", "margin: Input should be greater than 0"),
        ("margin: 0.01", "margin: .nan", "margin: "),
        ("margin: 0.01", "margin: .inf", "margin: "),
        ("alpha: 0.05", "alpha: 0.7", "alpha: Input should be less than or equal to 0.2"),
        ("primary: all", "primary: [", "is not YAML"),
        ("margin: 0.01", "margin: 0.01\nmargin: 0.2", "margin is there twice"),
        ("margins: {}", "margins: {mmlu: 0.01, mmlu: 0.2}", "mmlu is there twice"),
        ("margins: {}", "bounds: {mine: [1, 0]}", "bounds of mine: the lowest .* comes first, and 1 is not below 0"),
        ("margins: {}", "bounds: {mine: [1, 1]}", "bounds of mine: the lowest .* comes first, and 1 is not below 1"),
        ("margins: {}", "bounds: {mine: [0, .nan]}", r"bounds\.mine\.1: "),
        ("margins: {}", "bounds: {mine: [-.inf, 1]}", r"bounds\.mine\.0: "),
        ("margins: {}", "bounds: {mine: [-1.0e+308, 1.0e+308]}", "bounds of mine: .* are no two finite numbers"),
        ("margins: {}", "bounds: {mine: [0]}", r"bounds\.mine\.1: Field required"),
        ("margins: {}", "bounds: {mine: 1}", r"bounds\.mine: "),
        ("margins: {}", "bounds: {acc: [0, 1]}", "bounds of acc: by its definition acc is at least 0 and at most 1"),
        ("margins: {}", "bounds: {pass@1: [0, 2]}", "bounds of pass@1: by its definition"),
        ("margins: {}", "bounds: {lpips: [0, 1]}", "bounds of lpips: by its definition lpips is at least 0"),
        (
            "waivers: []",
            "waivers: [{task: mmlu, reason: known since May, by: Ann, granted: 2026-13-01, expires: 2027-01-01}]",
            "month must be in 1..12",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(shipped_policies()["release"].replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_policy(str(path))


def test_a_missing_or_unreadable_policy_file_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_policy(str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n", encoding="utf-8")
    with pytest.raises(UserError, match="not a mapping"):
        load_policy(str(tmp_path / "list.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_policy(str(tmp_path / "bytes.yaml"))
