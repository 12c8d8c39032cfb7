"""Which forwards a checkpoint has dropped, and which of them it still runs again."""

from memo_compile.driver.checkpoints import CheckpointedForward, CheckpointRound


def forward(key: int) -> CheckpointedForward:
    return CheckpointedForward((key,), (), {})


def drops(rounds: CheckpointRound, *keys: int) -> None:
    for key in keys:
        assert not rounds.begin(key, in_backward=False)
        rounds.end(forward(key), has_backward=False, in_backward=False)


def runs_again(rounds: CheckpointRound, key: int) -> tuple[CheckpointedForward, ...]:
    told = rounds.begin(key, in_backward=True)
    rounds.end(forward(key), has_backward=True, in_backward=True)
    return told


def test_a_round_is_whole_until_the_first_is_run_again() -> None:
    rounds = CheckpointRound()
    for _ in range(2):
        assert not rounds.is_open(in_backward=False)
        drops(rounds, 1, 2, 3)
        assert rounds.is_open(in_backward=True)
        for key in (3, 2, 1):
            assert rounds.is_whole(in_backward=True) is (key == 3)
            assert not runs_again(rounds, key)
        assert not rounds.dropped


def test_a_checkpoint_in_another_drops_a_forward_once_more() -> None:
    rounds = CheckpointRound()
    drops(rounds, 1, 2)
    for key in (2, 1):
        rounds.begin(key, in_backward=True)
        rounds.end(forward(key), has_backward=False, in_backward=True)
        assert len(rounds.dropped) == key
        runs_again(rounds, key)
    assert not rounds.dropped


def test_first_forwards_that_nobody_saw_are_known_when_the_next_round_begins() -> None:
    rounds = CheckpointRound()
    for told in ((), (forward(2), forward(1)), (forward(2), forward(1))):
        assert runs_again(rounds, 2) == told
        assert rounds.is_open(in_backward=True)
        assert not rounds.is_open(in_backward=False)
        assert not runs_again(rounds, 1)


def test_a_round_without_a_backward_is_forgotten() -> None:
    rounds = CheckpointRound()
    drops(rounds, 1, 2, 3)
    drops(rounds, 1)
    assert rounds.dropped == (forward(1),)
    assert rounds.is_whole(in_backward=True)
