"""Fixtures of the planner's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def unchecked(monkeypatch):
    """Tracing without its self-check, which takes seconds and has tests of its own."""
    from disco_ds.planner.tracing import selfcheck

    monkeypatch.setattr(selfcheck, "CHECKS", {})
