"""Every behaviour of the driver that the simulator models and gpushare relies on, each with its check.

`source` is the evidence for it:
    documented   in NVIDIA's driver API reference
    recorded     observed on a real driver: `detail` names GPU (or none), driver and date
    assumed      not observed yet; to be recorded when the suite runs on hardware
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.conformance import checks_capture as capture
from tests.conformance import checks_checkpoint as checkpoint
from tests.conformance import checks_memory as memory
from tests.conformance import checks_pools as pools
from tests.conformance import checks_time as time
from tests.conformance import checks_work as work
from tests.conformance.driver import Driver

NO_GPU = "no GPU, driver 535.261.03, 2026-11-21"


class Behaviour(NamedTuple):
    check: Callable[[Driver], None]
    source: str
    detail: str


MODES = (
    capture.other_threads_may_query_during_a_thread_local_capture,
    capture.own_query_breaks_a_thread_local_capture,
    capture.own_query_does_not_break_a_relaxed_capture,
    capture.capture_mode_is_the_threads_own,
    capture.relaxed_thread_may_allocate_during_a_capture,
)

BEHAVIOURS = (
    Behaviour(memory.alloc_returns_aligned_addresses, "documented", "suitably aligned for any kind of variable"),
    Behaviour(memory.large_allocation_takes_whole_blocks, "assumed", "physical memory comes in 2 MiB blocks"),
    Behaviour(memory.small_allocations_share_a_block, "assumed", "suballocation from blocks of 2 MiB per context"),
    Behaviour(memory.mebibyte_owns_its_block, "assumed", "from 1 MiB on an allocation owns its blocks"),
    Behaviour(memory.content_is_kept, "documented", "copies and memset"),
    Behaviour(memory.zero_size_is_invalid, "documented", "cuMemAlloc: bytesize 0 gives INVALID_VALUE"),
    Behaviour(memory.null_outputs_are_invalid, "assumed", "NULL where an answer goes gives INVALID_VALUE"),
    Behaviour(memory.free_of_null_succeeds, "assumed", "cuMemFree(0) does nothing"),
    Behaviour(memory.free_of_unknown_is_invalid, "documented", "cuMemFree needs a pointer of an allocation call"),
    Behaviour(memory.double_free_is_invalid, "assumed", "a freed pointer is unknown again"),
    Behaviour(memory.more_than_the_device_is_out_of_memory, "documented", "OUT_OF_MEMORY; nothing is taken"),
    Behaviour(memory.device_total_is_context_total, "assumed", "cuDeviceTotalMem equals cuMemGetInfo's total"),
    Behaviour(memory.pitch_is_a_multiple_of_512, "assumed", "pitch alignment of current GPUs"),
    Behaviour(memory.address_range_of_interior_pointer, "documented", "cuMemGetAddressRange: base and size"),
    Behaviour(memory.managed_memory_is_the_hosts_too, "documented", "managed memory is accessible from the host"),
    Behaviour(
        memory.managed_memory_comes_and_goes, "assumed", "managed memory takes the device's only while it is there"
    ),
    Behaviour(
        memory.nvml_lists_managed_memory_for_no_process,
        "assumed",
        "in NVIDIA's open kernel modules a client of the kernel's holds it, not the process",
    ),
    Behaviour(
        memory.nvml_lists_no_process_that_the_caller_cannot_see,
        "assumed",
        "NVIDIA's open kernel modules since 535.113: gpuGetProcWithObject, os_find_ns_pid",
    ),
    Behaviour(memory.pinned_memory_takes_nothing, "documented", "page-locked memory is host memory"),
    Behaviour(memory.array_takes_what_it_says, "assumed", "arrays own whole blocks"),
    Behaviour(memory.mipmap_takes_more_than_its_first_level, "assumed", "all levels are allocated at once"),
    Behaviour(memory.physical_memory_outlives_its_handle, "documented", "cuMemRelease: until mappings are gone"),
    Behaviour(memory.retained_handle_keeps_memory, "documented", "each retain needs a release"),
    Behaviour(memory.two_mappings_are_one_memory, "documented", "cuMemMap of one handle at two addresses"),
    Behaviour(
        memory.exported_memory_has_one_descriptor,
        "recorded",
        "H100 80GB HBM3, driver 580.159.04, 2026-11-27: device and inode of /dev/nvidiactl for each block",
    ),
    Behaviour(memory.granularity_is_one_block, "assumed", "cuMemGetAllocationGranularity: 2 MiB on every GPU so far"),
    Behaviour(memory.context_takes_memory_and_gives_it_back, "assumed", "every context has an overhead"),
    Behaviour(
        memory.nvml_total_has_reserved_memory,
        "recorded",
        "H100 80GB HBM3, driver 580.159.04, 2026-11-27: 480 MiB reserved; other sizes: simulator/models.py",
    ),
    Behaviour(
        memory.nvml_counts_the_context_of_the_process,
        "recorded",
        "H100 80GB HBM3, driver 580.159.04, 2026-11-27: 518 MiB of 526.8 taken; other models: simulator/models.py",
    ),
    Behaviour(
        memory.destroyed_streams_give_back_their_memory,
        "assumed",
        "PyTorch's 32 streams took 70 MiB of an H100; how much of it a destroyed stream gives back is not known",
    ),
    Behaviour(memory.module_takes_memory_on_first_use, "documented", "lazy loading, the default since CUDA 12.2"),
    Behaviour(pools.pool_reserves_more_than_it_hands_out, "assumed", "pools grow by 32 MiB"),
    Behaviour(
        pools.freed_pool_memory_stays_until_sync, "documented", "release threshold 0: given back at a synchronise"
    ),
    Behaviour(pools.release_threshold_keeps_memory, "documented", "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cuMemPoolTrimTo"),
    Behaviour(pools.pool_memory_can_be_freed_plainly, "documented", "cuMemFree of stream-ordered memory"),
    Behaviour(
        pools.plain_memory_can_be_freed_in_a_stream,
        "recorded",
        "H100 80GB HBM3, driver 580.159.04, 2026-11-27: cuMemFreeAsync gives 0; when the memory returns is assumed",
    ),
    Behaviour(pools.default_pool_serves_alloc_async, "documented", "cuMemAllocAsync uses the current pool"),
    Behaviour(pools.destroyed_pool_gives_memory_back, "documented", "cuMemPoolDestroy: when the last memory is freed"),
    Behaviour(pools.graph_memory_comes_with_the_launch, "documented", "memory nodes: mapped at upload or launch"),
    Behaviour(pools.graph_memory_leaves_with_the_trim, "documented", "cuDeviceGraphMemTrim"),
    Behaviour(work.calls_before_init_fail, "recorded", NO_GPU),
    Behaviour(work.init_flags_must_be_zero, "recorded", NO_GPU),
    Behaviour(work.without_context_is_invalid_context, "documented", "INVALID_CONTEXT"),
    Behaviour(work.forked_child_is_not_initialised, "assumed", "a forked child has no driver"),
    Behaviour(work.bad_ordinal_is_invalid_device, "documented", "cuDeviceGet"),
    Behaviour(work.primary_context_is_counted, "documented", "reset when the last retain is released"),
    Behaviour(work.context_stack_is_the_threads_own, "documented", "a stack of contexts per thread"),
    Behaviour(work.kernel_takes_its_time, "documented", "events have a resolution of about 0.5 us"),
    Behaviour(work.launch_returns_before_the_kernel_ends, "documented", "launches are asynchronous"),
    Behaviour(work.bad_launches_are_refused, "documented", "INVALID_VALUE"),
    Behaviour(work.unknown_function_is_not_found, "documented", "cuModuleGetFunction: NOT_FOUND"),
    Behaviour(work.host_function_runs_in_order, "documented", "cuLaunchHostFunc"),
    Behaviour(work.wait_value_holds_a_stream, "documented", "cuStreamWaitValue32"),
    Behaviour(work.event_orders_streams, "documented", "cuStreamWaitEvent"),
    Behaviour(work.captured_work_does_not_run, "documented", "stream capture"),
    Behaviour(work.sync_breaks_a_capture, "documented", "a capturing stream cannot be synchronised"),
    Behaviour(work.query_in_another_thread_breaks_a_global_capture, "documented", "cuThreadExchangeStreamCaptureMode"),
    Behaviour(work.relaxed_thread_may_query_during_a_capture, "documented", "cuThreadExchangeStreamCaptureMode"),
    Behaviour(work.alloc_breaks_a_global_capture, "documented", "cuMemAlloc is potentially unsafe"),
    Behaviour(work.legacy_stream_breaks_a_blocking_capture, "documented", "implicit dependency on a capturing stream"),
    *(
        Behaviour(check, "documented", "cuThreadExchangeStreamCaptureMode, cuStreamBeginCapture: modes")
        for check in MODES
    ),
    Behaviour(capture.record_outside_of_a_capture_does_not_break_it, "documented", "cuEventRecord is asynchronous"),
    Behaviour(capture.captured_event_has_no_state, "documented", "CAPTURED_EVENT"),
    Behaviour(capture.capture_ends_in_the_thread_that_began_it, "documented", "STREAM_CAPTURE_WRONG_THREAD"),
    Behaviour(capture.forked_work_must_be_joined, "documented", "STREAM_CAPTURE_UNJOINED"),
    Behaviour(capture.capture_ends_in_the_stream_where_it_began, "documented", "STREAM_CAPTURE_UNMATCHED"),
    Behaviour(capture.capture_cannot_wait_for_what_is_outside, "documented", "STREAM_CAPTURE_ISOLATION"),
    Behaviour(capture.captures_do_not_merge, "documented", "STREAM_CAPTURE_MERGE"),
    Behaviour(capture.legacy_stream_cannot_be_captured, "documented", "cuStreamBeginCapture: not CU_STREAM_LEGACY"),
    Behaviour(capture.capture_cannot_begin_twice, "assumed", "ILLEGAL_STATE"),
    Behaviour(time.full_queue_blocks_the_launch, "assumed", "about 1024 launches deep, then a launch blocks"),
    Behaviour(
        time.two_processes_halve_the_device, "documented", "time slicing between contexts; equal slices are assumed"
    ),
    Behaviour(time.a_neighbour_has_slices_of_milliseconds, "assumed", "about 2 ms, more or less"),
    Behaviour(time.launch_takes_microseconds_of_the_host, "assumed", "2 to 5 us"),
    Behaviour(time.event_takes_a_moment_of_the_device, "assumed", "about 1 us"),
    Behaviour(
        time.small_kernels_of_two_streams_overlap, "assumed", "documented as possible; blocks that fit run at once"
    ),
    Behaviour(time.large_kernels_run_one_after_the_other, "assumed", "the device is full: streams gain nothing"),
    Behaviour(time.event_of_an_idle_stream_does_not_wait_for_others, "documented", "streams are independent"),
    Behaviour(time.event_orders_streams_of_two_contexts, "documented", "cuStreamWaitEvent: also across contexts"),
    Behaviour(time.legacy_stream_waits_for_blocking_streams, "documented", "legacy default stream"),
    Behaviour(time.kernel_waits_for_another_stream, "documented", "streams may run at the same time"),
    Behaviour(
        time.kernel_waits_for_another_process, "assumed", "a spinning kernel is preempted at the end of its slice"
    ),
    Behaviour(time.wide_value_holds_a_stream, "documented", "cuStreamWaitValue64"),
    Behaviour(time.destroyed_stream_ends_its_work, "documented", "cuStreamDestroy returns at once"),
    Behaviour(time.destroyed_event_was_recorded, "documented", "cuEventDestroy returns at once"),
    Behaviour(time.graph_takes_the_time_of_its_chain, "documented", "edges order nodes"),
    Behaviour(
        time.branches_of_a_graph_take_the_time_of_the_longest,
        "assumed",
        "documented as possible; blocks that fit run at once",
    ),
    Behaviour(time.cooperative_launch_must_fit, "documented", "COOPERATIVE_LAUNCH_TOO_LARGE"),
    Behaviour(time.extended_launch_takes_attributes, "documented", "cuLaunchKernelEx"),
    Behaviour(
        checkpoint.checkpoint_frees_the_device_and_restore_fills_it,
        "documented",
        "cuda-checkpoint: all GPU resources are released, nvidia-smi no longer lists the process; contents come back",
    ),
    Behaviour(checkpoint.states_follow_the_calls, "documented", "CUprocessState after each call"),
    Behaviour(checkpoint.call_in_another_state_is_illegal, "documented", "ILLEGAL_STATE"),
    Behaviour(checkpoint.calls_wait_until_the_process_is_unlocked, "documented", "further calls block"),
    Behaviour(
        checkpoint.streams_modules_and_events_are_restored, "documented", "cuda-checkpoint: objects are restored"
    ),
    Behaviour(checkpoint.lock_gives_up_at_its_timeout, "documented", "NOT_READY; the process is RUNNING"),
    Behaviour(
        checkpoint.managed_memory_is_not_checkpointed, "documented", "cuda-checkpoint: no UVM; the result assumed"
    ),
    Behaviour(
        checkpoint.restore_without_room_is_out_of_memory,
        "assumed",
        "cuda-checkpoint issue 44: driver 580, CHECKPOINTED",
    ),
    Behaviour(checkpoint.checkpointed_process_can_be_killed, "assumed", "at once, in any state"),
    Behaviour(checkpoint.process_without_cuda_is_not_initialised, "assumed", "the reference lists NOT_INITIALIZED"),
    Behaviour(work.proc_address_by_version, "recorded", NO_GPU),
)
SOURCES = ("documented", "recorded", "assumed")
