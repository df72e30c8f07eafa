from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from wane.training.config import DataConfig
from wane.training.data import load_corpus
from wane.training.errors import DataError
from wane.training.wikitext import fetch_wikitext_2, read_wikitext_2

DATA = os.environ.get("WANE_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="WANE_DATA is not set to a folder with wikitext-2")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[object]:
    servers = []

    def start(folder: Path) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@needs_data
def test_wikitext_2_has_the_published_counts_and_a_shared_vocabulary_of_2048() -> None:
    corpus = load_corpus(DataConfig(kind="wikitext-2", path=Path(str(DATA)) / "wikitext-2"))
    assert corpus.words == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert corpus.vocabulary.size == 2048
    assert corpus.vocabulary.decode(corpus.streams["train"][:40].tolist()).startswith("\n\n= Valkyria Chronicles III =")


@needs_data
def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_bytes((Path(str(DATA)) / "wikitext-2" / f"{split}.txt").read_bytes())
    with (tmp_path / "test.txt").open("ab") as file:
        file.write(b"one more\n")
    with pytest.raises(DataError, match=r"test\.txt: SHA-256 is [0-9a-f]{64}, not WikiText-2's d790b833"):
        read_wikitext_2(tmp_path)


@needs_data
def test_the_public_copy_is_downloaded_once(tmp_path: Path, serve) -> None:  # type: ignore[no-untyped-def]
    source = serve(Path(str(DATA)) / "wikitext-2")
    folder = fetch_wikitext_2(tmp_path / "cache", source)
    _, hashes = read_wikitext_2(folder)
    assert sorted(hashes) == ["test.txt", "train.txt", "valid.txt"]
    assert fetch_wikitext_2(folder, "http://127.0.0.1:9/unreachable") == folder


def test_a_downloaded_file_with_a_wrong_hash_is_not_kept(tmp_path: Path, serve) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.txt").write_text("something else\n")
    with pytest.raises(DataError, match=r"train\.txt: SHA-256 is .* not WikiText-2's"):
        fetch_wikitext_2(tmp_path / "cache", serve(tmp_path))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_download_suggests_the_data_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"could not be downloaded .* use --data FOLDER"):
        fetch_wikitext_2(tmp_path, "http://127.0.0.1:9")
