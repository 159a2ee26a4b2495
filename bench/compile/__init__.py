"""Every launch compiled for every GPU, without one."""
