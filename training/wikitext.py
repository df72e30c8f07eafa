"""Reads WikiText-2 in its word-level version. The files are downloaded if no copy is on the machine. Their SHA-256 is
checked.

Source: Merity et al. 2016, arXiv 1609.07843. Licence: the text is from Wikipedia, CC BY-SA.
"""

from __future__ import annotations

import hashlib
import http.client
import urllib.request
from pathlib import Path

from wane.training.errors import DataError

PUBLIC_COPY = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
CACHE = Path.home() / ".cache" / "wane" / "wikitext-2"
TIMEOUT_S = 60

FILES = {  # for each split: the SHA-256 of its file, and its number of words including one <eos> per line
    "train": ("9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f", 2_088_628),
    "valid": ("f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8", 217_646),
    "test": ("d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0", 245_569),
}


def read_wikitext_2(folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Returns the stripped lines by split, and the SHA-256 of each file. Raises DataError."""
    lines, hashes = {}, {}
    for split, (expected, expected_words) in FILES.items():
        path = folder / f"{split}.txt"
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        hashes[path.name] = hashlib.sha256(raw).hexdigest()
        if hashes[path.name] != expected:
            raise DataError(f"{path}: SHA-256 is {hashes[path.name]}, not WikiText-2's {expected}")
        lines[split] = [line.strip() for line in raw.decode("utf-8").removesuffix("\n").split("\n")]
        words = sum(len(line.split()) + 1 for line in lines[split])
        if words != expected_words:
            raise DataError(f"{path}: {words} words with one <eos> per line, WikiText-2 has {expected_words}")
    return lines, hashes


def fetch_wikitext_2(folder: Path = CACHE, source: str = PUBLIC_COPY) -> Path:
    """Downloads missing files into `folder`. Returns the folder. Does not keep a file with a wrong hash. Raises
    DataError."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, (expected, _) in FILES.items():
        path = folder / f"{split}.txt"
        if path.exists():
            continue
        url = f"{source}/{split}.txt"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - a fixed https address
                raw = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise DataError(
                f"{url} could not be downloaded ({error}); use --data FOLDER for a folder that holds WikiText-2"
            ) from error
        found = hashlib.sha256(raw).hexdigest()
        if found != expected:
            raise DataError(f"{url}: SHA-256 is {found}, not WikiText-2's {expected}")
        partial = path.with_suffix(".partial")
        partial.write_bytes(raw)
        partial.replace(path)
    return folder
