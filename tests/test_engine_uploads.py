"""Host arrays on their way to the device. What a launch may not wait for is tests/gpu/test_gpu_executor.py's."""

import numpy as np
import torch

from engine.uploads import upload, upload_integers

CPU = torch.device("cpu")


def test_arrays_sent_together_arrive_apart_in_order_as_i64():
    arrays = [np.array([3, -1], np.int32), np.array([], np.int64), np.array([2**40], np.int64)]
    sent = upload_integers(CPU, *arrays)
    assert [part.tolist() for part in sent] == [[3, -1], [], [2**40]]
    assert {part.dtype for part in sent} == {torch.int64}


def test_an_array_that_is_not_contiguous_is_sent_as_it_reads():
    assert upload(np.arange(6).reshape(2, 3)[:, ::2], CPU).tolist() == [[0, 2], [3, 5]]
