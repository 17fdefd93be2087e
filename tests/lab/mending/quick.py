"""Settings with which a mending takes a second."""

QUICK = dict(batch_size=4, length=16, batches=2, calibration_batches=2, device="cpu", quiet=True)
