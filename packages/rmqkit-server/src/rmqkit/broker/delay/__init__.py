"""Delay levels and timed messages (ScheduleMessageService, TimerMessageStore)."""
