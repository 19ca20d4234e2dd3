"""Curves for a screen, by hand."""

import numpy as np
import pytest

from palestra.dashboard.curves import clip_x, downsample, mean_band, moving_mean


def test_smoothing_is_a_centred_mean():
    assert moving_mean(np.array([0.0, 3, 6]), 3).tolist() == [1.5, 3, 4.5]
    assert moving_mean(np.array([0.0, 3, 6]), 1).tolist() == [0, 3, 6]
    assert moving_mean(np.array([0.0, np.nan, 6]), 3).tolist() == [0, 3, 6]  # what is unknown is left out


def test_thinning_keeps_every_spike():
    x, y = np.arange(10_000.0), np.zeros(10_000)
    y[[17, 5000, 9998]] = [9, -7, 5]
    few_x, few_y = downsample((x, y), 200)
    assert len(few_x) <= 210 and few_x[0] == 0 and few_x[-1] == 9999
    assert {17, 5000, 9998} <= set(few_x.tolist()) and few_y.max() == 9 and few_y.min() == -7
    assert (np.diff(few_x) > 0).all()
    assert downsample((x[:50], y[:50]), 200)[0] is x[:50] or len(downsample((x[:50], y[:50]), 200)[0]) == 50


def test_a_part_has_a_neighbour_at_either_side():
    x, y = clip_x((np.arange(10.0), np.arange(10.0)), 3.5, 5.5)
    assert x.tolist() == y.tolist() == [3, 4, 5, 6]


def test_a_band_is_of_where_all_curves_are():
    one, other = (np.array([0.0, 1, 2]), np.array([0.0, 1, 2])), (np.array([1.0, 2, 3]), np.array([3.0, 4, 5]))
    x, mean, low, high = mean_band([one, other], 100)
    assert x.tolist() == [1, 2] and mean.tolist() == [2, 3] and low.tolist() == [1, 2] and high.tolist() == [3, 4]
    assert len(mean_band([], 100)[0]) == 0


@pytest.mark.parametrize("points", [10, 100])
def test_a_long_band_is_thinned_too(points):
    curve = (np.arange(5000.0), np.ones(5000))
    assert len(mean_band([curve, curve], points)[0]) == points
