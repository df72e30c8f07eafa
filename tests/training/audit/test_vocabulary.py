from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from wane.training.audit.vocabulary import ForeignVocabulary, read_names, read_tokenizer, reserve
from wane.training.errors import ForeignError

TEXT = ["the cat sat on the mat", "the dog sat on the log", "a café, 日本"] * 3


def byte_level(path: Path, special: list[str], text: list[str] = TEXT) -> Tokenizer:
    """Trains a byte-level BPE as users of Hugging Face do, and writes it to `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(path))
    return tokenizer


@pytest.mark.parametrize("special", ["<eos>", "</s>", "<|endoftext|>", "[SEP]"])
def test_a_byte_level_bpe_keeps_its_ids_and_its_end_token_becomes_eos(tmp_path: Path, special: str) -> None:
    theirs = byte_level(tmp_path / "tokenizer.json", ["<pad>", special])
    read = read_tokenizer(tmp_path / "tokenizer.json", "text", None)
    ours = read.vocabulary
    assert (ours.kind, ours.size, ours.eos_id) == ("bpe", theirs.get_vocab_size(), 1)
    assert ours.encode(TEXT[2]) == theirs.encode(TEXT[2]).ids
    assert ours.decode(ours.encode("\n".join(TEXT))) == "\n".join(TEXT)
    assert ours.encode("the\ncat") == [*theirs.encode("the").ids, 1, *theirs.encode("cat").ids]
    assert any("is renamed to <eos>" in note for note in read.notes) is (special != "<eos>")


def test_an_end_token_of_any_name_can_be_given(tmp_path: Path) -> None:
    byte_level(tmp_path / "tokenizer.json", ["<begin>", "</s>"])
    assert read_tokenizer(tmp_path / "tokenizer.json", "text", None).vocabulary.eos_id == 1
    assert read_tokenizer(tmp_path / "tokenizer.json", "text", "<begin>").vocabulary.eos_id == 0
    with pytest.raises(ForeignError, match="--eos <none>: there is no such token"):
        read_tokenizer(tmp_path / "tokenizer.json", "text", "<none>")


def test_without_an_end_token_the_line_break_becomes_eos_and_has_no_merges(tmp_path: Path) -> None:
    theirs = byte_level(tmp_path / "tokenizer.json", [], ["one\n\n\n\ntwo\n\n", "\n\none"] * 5)
    assert theirs.token_to_id("ĊĊ") is not None
    vocabulary = read_tokenizer(tmp_path / "tokenizer.json", "text", None).vocabulary
    assert vocabulary.eos_id == theirs.token_to_id("Ċ")
    assert vocabulary.encode("one\n\ntwo") == [
        *theirs.encode("one").ids,
        vocabulary.eos_id,
        vocabulary.eos_id,
        *theirs.encode("two").ids,
    ]


def test_postprocessing_padding_and_truncation_are_dropped(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_tokenizer(tmp_path / "tokenizer.json", "text", None).vocabulary
    assert vocabulary.decode(vocabulary.encode(TEXT[0])) == TEXT[0]


def word_level(path: Path, unknown: str | None = "[UNK]") -> Path:
    table = {name: index for index, name in enumerate(["[UNK]", "</s>", "open", "shut"])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=unknown or "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


def test_a_word_level_tokenizer_encodes_words_or_events(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json")
    words = read_tokenizer(path, "text", None).vocabulary
    assert (words.kind, words.encode("open what\nshut")) == ("words", [2, 0, 1, 3])
    events = read_tokenizer(path, "events", None).vocabulary
    assert (events.kind, events.encode_events(["open", "what", "shut"])) == ("events", [2, 0, 3])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"), "a tokenizer of the kind WordPiece"),
        (models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0), "a tokenizer of the kind Unigram"),
        (models.BPE({"▁a": 0, "</s>": 1}, []), "a tokenizer of the kind BPE, not byte-level"),
    ],
)
def test_a_lossy_tokenizer_is_refused(tmp_path: Path, model: models.Model, message: str) -> None:
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ForeignError, match=message):
        read_tokenizer(tmp_path / "tokenizer.json", "text", None)


def test_a_byte_level_bpe_with_an_undecodable_token_is_refused(tmp_path: Path) -> None:
    byte_level(tmp_path / "tokenizer.json", ["</s>", "▁pad"])
    with pytest.raises(ForeignError, match="which byte-level BPE never writes"):
        read_tokenizer(tmp_path / "tokenizer.json", "text", None)


def test_a_bpe_is_refused_for_events(tmp_path: Path) -> None:
    byte_level(tmp_path / "tokenizer.json", ["</s>"])
    with pytest.raises(ForeignError, match="each event needs one token: use --vocabulary"):
        read_tokenizer(tmp_path / "tokenizer.json", "events", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not a tokenizer.json"),
        ("{}", "not a tokenizer.json"),
        ("{", "not JSON"),
        ('{"model": {"type": "BPE"}}', "a tokenizer of the kind BPE"),
        (
            '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}',
            r"none of the 2 tokens .* name it with --eos TOKEN",
        ),
        (
            '{"model": {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 5}, "unk_token": "a"}}',
            "no token with id 1",
        ),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ForeignError, match=f"tokenizer.json: .*{message}"):
        read_tokenizer(tmp_path / "tokenizer.json", "text", None)


@pytest.mark.parametrize("form", ["list", "object", "lines"])
def test_a_list_of_words_is_a_vocabulary_of_words(tmp_path: Path, form: str) -> None:
    names = ["open", "</s>", "shut", "<UNK>"]
    path = tmp_path / ("names.txt" if form == "lines" else "names.json")
    table = {name: index for index, name in reversed(list(enumerate(names)))}
    path.write_text(
        {"list": json.dumps(names), "object": json.dumps(table), "lines": "open\r\n</s>\nshut\n<UNK>\n"}[form]
    )
    read = read_names(path, "text", None)
    assert (read.vocabulary.kind, read.vocabulary.encode("shut what\nopen")) == ("words", [2, 3, 1, 0])
    events = read_names(path, "events", None).vocabulary
    assert (events.kind, events.encode_events(["shut", "what"])) == ("events", [2, 3])


def test_a_list_of_characters_is_a_vocabulary_of_characters(tmp_path: Path) -> None:
    names = ["\n", " ", *"aé日<"]
    (tmp_path / "stoi.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    read = read_names(tmp_path / "stoi.json", "text", None)
    text = "a 日é\n<a"
    assert read.vocabulary.encode(text) == [names.index(character) for character in text]
    assert read.vocabulary.decode(read.vocabulary.encode(text)) == text
    assert "every name is one character: text is split into characters" in read.notes
    with pytest.raises(ValueError, match="cannot be encoded"):
        read.vocabulary.encode("b")


def test_an_unknown_character_becomes_unk(tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps(["<unk>", "</s>", "a", "é"]))
    vocabulary = read_names(tmp_path / "names.json", "text", None).vocabulary
    assert vocabulary.encode("aüé\nz") == [2, 0, 3, 1, 0]


def test_without_an_unk_token_unknown_items_are_refused(tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps(["</s>", "open", "shut"]))
    words = read_names(tmp_path / "names.json", "text", None)
    assert any("they are refused" in note for note in words.notes)
    assert words.vocabulary.encode("shut\nopen") == [2, 0, 1]
    with pytest.raises(ValueError, match="cannot be encoded"):
        words.vocabulary.encode("what")
    events = read_names(tmp_path / "names.json", "events", None).vocabulary
    assert events.encode_events(["shut", "open"]) == [2, 1]
    with pytest.raises(ValueError, match="the vocabulary has no event 'what' and no <unk>"):
        events.encode_events(["shut", "what"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('["a", "a", "</s>"]', "the name 'a' occurs more than once"),
        ('["a", 3]', "expected a list of names"),
        ('{"a": 0, "b": 2}', "the ids of 2 names must be 0 to 1, each exactly once"),
        ('{"a": 0, "b": "1"}', "the ids of 2 names must be 0 to 1"),
        ('["two words", "one", "</s>"]', "'two words' is not one word"),
        ('["open", "shut"]', "none of the 2 tokens has a usual name of a token that begins a sequence"),
        ('["a\\n", "<eos>", "</s>"', "not JSON"),
    ],
)
def test_an_invalid_list_of_names_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "names.json").write_text(content)
    with pytest.raises(ForeignError, match=message):
        read_names(tmp_path / "names.json", "text", None)


def test_two_tokens_cannot_both_be_eos(tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text('["<eos>", "stop", "go"]')
    with pytest.raises(ForeignError, match="'stop' should begin a sequence, but another token has the name <eos>"):
        read_names(tmp_path / "names.json", "events", "stop")


def test_the_error_names_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=r"none.json: No such file"):
        read_names(tmp_path / "none.json", "text", None)
    (tmp_path / "names.txt").write_bytes(b"a\n\xff\n")
    with pytest.raises(ForeignError, match=r"names.txt: not UTF-8 at byte 2"):
        read_names(tmp_path / "names.txt", "text", None)


def test_a_normalizer_is_kept(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "tokenizer.json", ["</s>"])
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_tokenizer(tmp_path / "tokenizer.json", "text", None).vocabulary
    assert vocabulary.encode("The CAT") == vocabulary.encode("the cat")


@pytest.mark.parametrize("form", ["names", "tokenizer"])
def test_eos_none_adds_an_end_to_events_that_have_none(tmp_path: Path, form: str) -> None:
    if form == "names":
        path = tmp_path / "names.txt"
        path.write_text("view\ncart\nbuy", encoding="utf-8")
        read = read_names(path, "events", "none")
    else:
        path = tmp_path / "tokenizer.json"
        Tokenizer(models.WordLevel({"view": 0, "cart": 1, "buy": 2}, unk_token="<unk>")).save(str(path))
        read = read_tokenizer(path, "events", "none")
    assert (read.start, read.added, read.vocabulary.eos_id) == ("zero", 1, 3)
    assert [read.vocabulary.token(index) for index in range(4)] == ["view", "cart", "buy", "<eos>"]


def test_eos_none_keeps_an_end_that_has_a_usual_name(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("view\n</s>\nbuy", encoding="utf-8")
    read = read_names(path, "events", "none")
    assert (read.start, read.added, read.vocabulary.size, read.vocabulary.eos_id) == ("zero", 0, 3, 1)


def test_eos_none_adds_no_line_break_to_a_text(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("to\nbe\nnot", encoding="utf-8")
    with pytest.raises(ForeignError, match="none of the 3 tokens has a usual name of a token that begins a sequence"):
        read_names(path, "text", "none")


def test_the_error_for_a_missing_start_token_mentions_the_zero_start(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("view\nbuy", encoding="utf-8")
    with pytest.raises(ForeignError, match="use --eos none if the model starts from the zero state"):
        read_names(path, "events", None)


def _reserved(
    read: ForeignVocabulary, *ignored: str, padding: tuple[int, ...] = (), zero: tuple[int, ...] = ()
) -> set[int]:
    found = reserve(read, Path("names"), ignored, padding, zero)
    assert len([note for note in found.notes if "is never read, listed or drawn" in note]) == len(
        found.vocabulary.reserved
    )
    return set(found.vocabulary.reserved)


def test_padding_is_reserved_by_its_name_its_row_of_zeros_the_checkpoint_or_an_option(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("\n".join(["none", "[PAD]", "<eos>", "a", "[MASK]"]))
    read = read_names(tmp_path / "names", "events", None)
    assert _reserved(read) == {1, 4}
    assert _reserved(read, zero=(0,)) == {0, 1, 4}
    assert _reserved(read, zero=(0, 3)) == {1, 4}  # several rows of zeros are not padding
    assert _reserved(read, zero=(2,)) == {1, 4}  # <eos> is read
    assert _reserved(read, padding=(0, 17)) == {0, 1, 4}
    assert _reserved(read, "a") == {1, 3, 4}
    assert _reserved(read, "none", padding=(0,), zero=(0,)) == set()
    for wrong in ("b", "<eos>"):
        with pytest.raises(ForeignError, match=f"--ignore-token {wrong}: there is no such token"):
            _reserved(read, "a", wrong)


def test_a_tokenizer_names_its_padding(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"nothing": 0, "<eos>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.enable_padding(pad_id=0, pad_token="nothing")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert _reserved(read_tokenizer(tmp_path / "tokenizer.json", "events", None)) == {0}
