"""The tests run on the CPU; SUBLAYER_TEST_DEVICE=cuda runs the same ones on a GPU."""

from __future__ import annotations

import os
import warnings

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("default"), max_examples=200)
hypothesis.settings.load_profile(os.environ.get("SUBLAYER_TEST_PROFILE", "default"))

DEVICE = os.environ.get("SUBLAYER_TEST_DEVICE", "cpu")
torch.set_default_device(DEVICE)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Training that touches nobody's cache, and does not measure the machine first."""
    monkeypatch.setenv("SUBLAYER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sublayer.training.journal.matrix_rate", lambda device, dtype: 1e10)
    with torch.device("cpu"):
        yield


@pytest.fixture
def quiet():
    """What other libraries warn of is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# A server with a small model of each kind, for the tests that talk to it; other tests do not load its libraries.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from support_serving import save_all

    return save_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(folders):
    from sublayer.serving import Limits
    from support_serving import Running

    out = Running([*map(str, folders.values())], limits=Limits(max_batch=6, queue=20, chunk=16))
    yield out
    out.stop()


@pytest.fixture(scope="module")
def client(server):
    return server.client()
