"""Models by their name on the Hub: from a server, out of the cache, offline, not at all."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from orchestrator import server as orchestrator
from shared.config import OrchestratorConfig, served_name
from shared.errors import CheckpointError
from shared.models import hub
from shared.models.checkpoint_names import resolve_model
from shared.models.config import resolve_draft
from shared.models.tensor_files import read_tensor_infos
from tests import checkpoints

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some-org/Tiny-1.5B"


class Hub:
    """A server that has one model, in the parts of the Hub's API that a download uses."""

    def __init__(self, directory: Path) -> None:
        self.files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file()
        }
        self.downloaded: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                owner.answer(self, has_body=False)

            def do_GET(self) -> None:
                owner.answer(self, has_body=True)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, *, has_body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        status, body, headers = 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if path.startswith(f"/api/models/{REPO}/tree/{COMMIT}"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in self.files.items()
            ]
            status, body, headers = 200, json.dumps(entries).encode(), {}
        elif path in (f"/api/models/{REPO}/revision/{name}" for name in ("main", "v1", COMMIT)):
            status, body, headers = 200, json.dumps({"id": REPO, "sha": COMMIT}).encode(), {}
        elif path.startswith(f"/api/models/{REPO}/revision/"):
            headers = {"X-Error-Code": "RevisionNotFound"}
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
            status, body = 200, self.files[name]
            headers = {"ETag": f'"{_etag(body)}"', "X-Repo-Commit": COMMIT}
            if has_body:
                self.downloaded.append(name)
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if has_body:
            request.wfile.write(body)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let huggingface_hub, which has read HF_ENDPOINT when it was imported, call this server."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Point huggingface_hub at an empty cache and at a port where nobody listens."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    point_at(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.chdir(tmp_path)
    hub.fetch.cache_clear()
    yield tmp_path / "cache"
    hub.fetch.cache_clear()


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    model = checkpoints.write_llama(tmp_path / "published")
    (model / "README.md").write_text("never downloaded")
    (model / "consolidated.safetensors").write_bytes(b"the same in another format")
    (model / "pytorch_model.bin").write_bytes(b"the same as a pickle")
    (model / "onnx").mkdir()
    (model / "onnx" / "config.json").write_text("{}")
    server = Hub(model)
    point_at(monkeypatch, server.url)
    yield server
    server.close()


TEXTS = ["config.json", "tokenizer.json", "tokenizer_config.json"]


def put_into_cache(cache: Path, model: Path, revision: str = "main") -> Path:
    """Lay a model out as huggingface_hub does."""
    folder = cache / f"models--{REPO.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / revision).write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        (folder / "blobs").mkdir(exist_ok=True)
        blob = folder / "blobs" / _etag(path.read_bytes())
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blob)
    return snapshot


def test_a_model_is_downloaded_once(serving: Hub, cache: Path) -> None:
    directory = resolve_model(REPO, "target")
    assert directory.is_relative_to(cache) and directory.name == COMMIT
    assert sorted(serving.downloaded) == sorted([*TEXTS, "model.safetensors"])
    assert read_tensor_infos(directory)
    hub.fetch.cache_clear()
    assert resolve_draft(f"{REPO}@v1", "auto", directory) == directory
    assert resolve_model(f"{REPO}@{COMMIT}", "target") == directory
    assert len(serving.downloaded) == 4, "it is in the cache"


def test_pickled_weights_are_fetched_where_there_are_no_others(serving: Hub) -> None:
    del serving.files["model.safetensors"]
    resolve_model(REPO, "eagle3")
    assert sorted(serving.downloaded) == sorted([*TEXTS, "pytorch_model.bin"])


def test_an_orchestrator_fetches_no_weights(serving: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[OrchestratorConfig] = []

    def run(config: OrchestratorConfig) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr(orchestrator, "_run", run)
    config = OrchestratorConfig(model=f"{REPO}@v1")
    assert served_name(config) == "Tiny-1.5B"
    assert orchestrator.main(config) == 0
    assert sorted(serving.downloaded) == sorted(TEXTS)
    assert Path(served[0].model).name == COMMIT and served_name(served[0]) == "Tiny-1.5B"
    assert orchestrator.main(OrchestratorConfig(model="demo")) == 0
    assert served[1].model == "demo"


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_cached_model_needs_no_network(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_offline: bool,  # noqa: FBT001
) -> None:
    """Offline, or with a Hub that does not answer."""
    snapshot = put_into_cache(cache, checkpoints.write_llama(tmp_path / "model"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    assert resolve_model(REPO, "target") == snapshot
    if is_offline:  # else huggingface_hub tries for 23 s before it looks there
        assert resolve_model(f"{REPO}@{COMMIT}", "target") == snapshot
    with pytest.raises(CheckpointError, match=f"{REPO}@v2 is no folder here"):
        resolve_model(f"{REPO}@v2", "target")


def test_offline_asks_nobody(serving: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE") as raised:
        resolve_model(REPO, "target")
    assert str(cache) in str(raised.value) and "hf download" in str(raised.value)
    assert not serving.downloaded


@pytest.mark.parametrize(
    "name", ["other-org/other", f"{REPO}@nowhere", "a--b/c", "org/name"], ids=str
)
def test_what_the_hub_does_not_have(serving: Hub, name: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        resolve_model(name, "target")
    message = str(raised.value)
    assert message.startswith(f"{name} is no folder here") and serving.url in message


def test_a_folder_goes_first_and_other_paths_are_no_names(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path / "models" / "mine")
    assert resolve_model("models/mine", "target") == Path("models/mine")
    assert hub.last_part("models/mine") == hub.last_part(str(directory)) == "mine"
    for path in ("a/b/c", "/models/mine", "./models", "~/models", "models", "../models", "demo"):
        assert not hub.is_hub_name(path)
    assert hub.is_hub_name("models/other") and hub.is_hub_name("o/n@refs/pr/3")
    assert hub.last_part("org/name@refs/pr/3") == "name"
