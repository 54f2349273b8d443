"""The demonstration and its engine; that it and the self-test notice what is wrong."""

import argparse
import re
import subprocess
import sys

import pytest

import gdn_paged
from gdn_paged import check, demo
from gdn_paged._demo.cache import PageAllocator, PrefixTree


def parsed(module, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


def test_demo_serves_a_text_of_the_user(tmp_path):
    text = tmp_path / "text"
    questions = "\n\n".join(f"Question {i}: what is {i} times {i}?" for i in range(5))
    prefix = "A prefix that all requests share.\n" * 20
    text.write_text(prefix + "---\n" + questions)
    command = [sys.executable, "-m", "gdn_paged", "demo", "--device", "cpu"]
    command += ["--text", str(text), "--page-size", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"5 requests, {len(prefix)} tokens of shared prefix" in done.stdout
    reused = re.search(r"with reuse .* (\d+) of \d+ prompt tokens", done.stdout)
    assert int(reused[1]) >= 3 * (len(prefix) // 64 * 64)  # the second starts while it is computed
    assert "equal to the last bit" in done.stdout
    assert done.stderr == ""  # no progress bar where nobody looks


def test_demo_takes_any_text():
    prefix, prompts = demo.read_requests(b"short\n\ntext", limit=9, max_prompt=99)
    assert [p[:prefix] for p in prompts] == [prompts[0][:prefix]] * len(prompts)
    assert b"".join(prompts).count(b"text") == 1
    with pytest.raises(ValueError, match="found no paragraph"):
        demo.read_requests(b"", limit=9, max_prompt=99)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--pages", "5", "pages: the pool has 5, expected at least 14"),
        ("--page-size", "100", "page_size: 100"),
        ("--max-prompt", "9", "max-prompt: got 9"),
    ],
)
def test_demo_names_what_is_wrong(option, value, words, capsys):
    assert demo.run(parsed(demo, option, value, "--device", "cpu")) == 2
    assert words in capsys.readouterr().err


def test_demo_notices_a_different_result(monkeypatch, capsys):
    match = PrefixTree.match
    monkeypatch.setattr(PrefixTree, "match", lambda self, tokens: match(self, tokens)[::-1])
    words = ("--requests", "3", "--layers", "1", "--new-tokens", "1", "--device", "cpu")
    assert demo.run(parsed(demo, *words)) == 1
    assert "changed the result" in capsys.readouterr().err


@pytest.mark.parametrize(
    "function", ["chunk_gated_delta_rule_paged", "gated_delta_rule_decode_paged"]
)
@pytest.mark.parametrize("fault", ["output", "page"])
def test_check_notices_a_fault(function, fault, monkeypatch, capsys):
    correct = getattr(gdn_paged, function)

    def broken(*args, state_pool, **kwargs):
        output = correct(*args, state_pool=state_pool, **kwargs)
        if fault == "output":
            output[0] *= 1.01
        else:
            state_pool[13] += 1  # a page of no sequence
        return output

    monkeypatch.setattr(gdn_paged, function, broken)
    assert check.run(parsed(check)) == 1
    assert "FAILED" in capsys.readouterr().out


def test_tree_shares_full_pages_and_gives_back_the_oldest():
    allocator = PageAllocator(4)
    tree = PrefixTree(allocator, page_size=2)
    first, second = allocator.allocate(), allocator.allocate()
    tree.insert(b"aabbc", [first, second])
    assert tree.match(b"aabx") == [first]
    assert tree.match(b"xaab") == []
    for page in (first, first, second):
        allocator.release(page)
    assert allocator.num_free == 2  # the tree still holds both
    assert tree.match(b"aabbcc") == [first, second]
    assert not tree.evict(3)  # held by that match
    allocator.release(first)
    allocator.release(second)
    assert tree.evict(3)  # a leaf goes before its parent
    assert tree.match(b"aabb") == [first]
