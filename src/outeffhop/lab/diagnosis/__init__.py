"""Diagnosis: a checkpoint's outliers, what 8 bits cost it, and what can be done."""
