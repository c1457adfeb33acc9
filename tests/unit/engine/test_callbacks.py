from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from convolve.engine.callbacks import IntervalTrigger

sizes = st.integers(1, 97)


@settings(deadline=None)
@given(batch=sizes, every=st.fractions(Fraction(1, 3), 500), total=st.integers(100, 5000))
def test_every_beat_is_met_exactly_once_whatever_the_batch(batch, every, total):
    rhythm = IntervalTrigger(every, total)
    positions = list(range(0, total, batch)) + [total]
    met = [now for before, now in zip(positions, positions[1:], strict=False) if rhythm.due(before, now)]
    beats = {-(-(k * every) // batch) for k in range(1, int(total / every) + 1)}
    assert met[-1] == total
    assert len(met) == len({min(beat * batch, total) for beat in beats} | {total})


def test_without_a_period_only_the_end_is_due():
    rhythm = IntervalTrigger(None, 100)
    assert not rhythm.due(0, 99)
    assert rhythm.due(99, 100)
