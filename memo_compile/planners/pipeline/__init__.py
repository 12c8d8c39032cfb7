"""Pipeline parallelism: schedules, memory of each rank, offloading that knows the schedule."""
