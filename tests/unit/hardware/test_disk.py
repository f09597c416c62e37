"""The file system of a folder, from the kernel's table of mounts."""

from eke.hardware import file_system


def test_innermost_and_last_mount_is_used(tmp_path) -> None:
    inner = tmp_path / "a b"
    inner.mkdir()
    escaped = str(inner).replace(" ", "\\040")
    table = tmp_path / "mounts"
    table.write_text(
        f"disk / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
        f"none {escaped} tmpfs rw 0 0\ndisk2 {escaped} xfs rw 0 0\n"
    )
    assert file_system(inner, table) == "xfs"
    assert file_system(tmp_path, table) == "nfs4"
    assert file_system(tmp_path.parent, table) == "ext4"


def test_missing_mount_table_gives_unknown_file_system(tmp_path) -> None:
    assert file_system(tmp_path, tmp_path / "none") == ""
