"""Outlier metrics in plain loops, float64, scipy's kurtosis."""

import numpy as np
from scipy.stats import kurtosis


def plain_stats(x, real=None):
    """x: [B, T, d] array; real: [B, T] bool. A dict with the names of ``TensorStats``."""
    x = np.asarray(x, dtype=np.float64)
    real = np.ones(x.shape[:2], dtype=bool) if real is None else np.asarray(real)
    norms, kurtoses, token_norms, token_kurtoses, outliers = [], [], [], [], []
    for b in range(len(x)):
        kept = x[b][real[b]]
        norms.append(abs(kept).max())
        kurtoses.append(kurtosis(kept, axis=None, fisher=False))
        for row in kept:
            token_norms.append(abs(row).max())
            token_kurtoses.append(kurtosis(row, fisher=False))
        mean, std = kept.mean(), kept.std()
        for t in range(x.shape[1]):
            for channel in range(x.shape[2]):
                if real[b, t] and abs(x[b, t, channel] - mean) > 6 * std:
                    outliers.append((x[b, t, channel], b, t, channel))
    return {
        "inf_norm": np.mean(norms),
        "max_abs": np.max(norms),
        "kurtosis": np.mean(kurtoses),
        "token_inf_norm": np.mean(token_norms),
        "token_kurtosis": np.mean(token_kurtoses),
        "outliers": sorted(outliers, key=lambda o: (-abs(o[0]), *o[1:])),
    }
