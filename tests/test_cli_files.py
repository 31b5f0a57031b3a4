"""What commands write: whole or not at all, through links, to pipes, and with a clear error."""

import os
import threading

import pytest

from bigpool.cli._files import write_whole
from bigpool.errors import ArgumentError


def left(folder):
    return [file.name for file in folder.iterdir()]


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "record.json"
    for text in ("one", "two"):
        write_whole(text, file)
        assert file.read_text() == text
    assert left(tmp_path) == ["record.json"]


def test_a_link_stays_one(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_whole("new", link)
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole("through", pipe)
    reader.join(10)
    assert read == ["through"]
    assert left(tmp_path) == ["pipe"]


def test_what_cannot_be_written_is_said(tmp_path):
    file = tmp_path / ("x" * 300)
    with pytest.raises(ArgumentError, match=r"^bigpool: output: expected a file that can be written, got "):
        write_whole("text", file)
    with pytest.raises(ArgumentError, match="No such file or directory; name another one"):
        write_whole("text", tmp_path / "nowhere" / "record.json")
    assert left(tmp_path) == []
