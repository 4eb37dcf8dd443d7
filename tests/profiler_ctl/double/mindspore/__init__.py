"""Stands for MindSpore where a test needs its profiler's surface only, and no second of import and of analysis.

What it does was seen of MindSpore 2.10 (tests/e2e/test_profile_msrun.py runs the real one): one directory a session,
named HOST_PID_TIME_ascend_ms, with a Chrome trace; here of one event a step.
"""
