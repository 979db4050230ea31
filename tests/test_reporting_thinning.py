"""Long runs are written ever more rarely, and lose nothing that is rare."""

import numpy as np
from reporting_readers import read_tag

from keras_mixprec.reporting.file_source import FileSource
from keras_mixprec.reporting.layer_tables import Thinning
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog

METRICS = {"activation_headroom_bits": "min", "activation_nonfinite": "max"}


def test_rows_grow_with_the_logarithm_of_a_run():
    def written(calls):
        thinning = Thinning()
        return sum(thinning.due() for _ in range(calls))

    assert [written(n) for n in (500, 1500, 3500)] == [500, 1000, 1500]
    assert written(1_000_000) < 10_000


def test_what_happened_in_one_step_of_thousands_is_there(tmp_path):
    rare = 6543
    with RunLog(tmp_path) as log:
        for step in range(7001):
            table = np.array([[8.0, 0.0], [np.nan, 0.0]])
            if step == rare:
                table = np.array([[-2.0, 1.0], [3.0, 0.0]])
            log.heat(step, table, ["a", "b"], METRICS)
    tags = [f"mixprec/heat/{chunk:05d}" for chunk in range(7)]
    rows = {}
    for tag in tags:
        rows |= read_tag(log.folder, tag)
    assert len(rows) == 1938  # The last, which waited, included.
    assert max(rows) == 7000
    (found,) = [step for step, row in rows.items() if row[0, 1]]
    assert rare <= found < rare + 8
    np.testing.assert_array_equal(rows[found], [[-2.0, 1.0], [3.0, 0.0]])

    data = RunData("run", FileSource(log.folder))
    grid = data.grid("activation_headroom_bits", 100)
    assert grid.worst.shape == (2, 97)  # Groups of 20 rows.
    # An infinity leaves no headroom, whatever the finite numbers have.
    (column,) = np.flatnonzero(grid.worst[0] == -np.inf)
    assert grid.first[column] <= found <= grid.last[column]
    assert grid.worst[1, column] == 3.0
    assert np.isnan(np.delete(grid.worst[1], column)).all()


def test_layers_that_change_begin_a_new_table(tmp_path):
    with RunLog(tmp_path) as log:
        log.heat(0, [[1.0, 0.0]], ["a"], METRICS)
        log.heat(1, [[2.0, 0.0], [3.0, 0.0]], ["b", "a"], METRICS)
    data = RunData("run", FileSource(log.folder))
    grid = data.grid("activation_headroom_bits", 10)
    assert grid.layers == ["b", "a"]
    np.testing.assert_array_equal(grid.worst, [[np.nan, 2.0], [1.0, 3.0]])
