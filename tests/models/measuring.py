"""What tests of several folders measure."""

import torch


def largest_allocation(function):
    """Bytes of the largest single allocation while a function runs, inside operators too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    return max(
        event.cpu_memory_usage for event in profiler.events() if event.name == "[memory]" or event.cpu_memory_usage
    )
