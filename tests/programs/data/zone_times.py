import datetime, zoneinfo

print(
    datetime.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")).astimezone(
        datetime.timezone.utc
    )
)
