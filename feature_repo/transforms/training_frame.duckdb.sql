-- One row per impression of a day with the number of the user's events that were available strictly before it.
-- Requests sort before events of the same microsecond, so a running count of events is a strict `<`.
-- Inputs: impressions (of the day), segment(user_code, available_us: the day's part of the event log),
-- earlier(user_code, num_events: events of all earlier days), surfaces(name, code), users, ads (catalogue of the day).
-- Parameters: timezone, negative_rate.
with shown as (
    select
        row_number() over (order by impressions.timestamp, impressions.request_id, impressions.position, impressions.ad_id) - 1 as row_id,
        impressions.*,
        users.user_code,
        ads.ad_code,
        surfaces.code as surface_code
    from impressions
    join users on users.user_id = impressions.user_id
    join ads on ads.ad_id = impressions.ad_id
    left join surfaces on surfaces.name = impressions.surface
),
timeline as (
    select user_code, available_us as at_us, 1 as num_events, cast(null as bigint) as row_id from segment
    union all
    select user_code, epoch_us(timestamp) as at_us, 0 as num_events, row_id from shown
),
counted as (
    select
        row_id,
        sum(num_events) over (
            partition by user_code order by at_us, num_events rows between unbounded preceding and current row
        ) as num_before
    from timeline
)
select
    shown.row_id,
    shown.request_id,
    shown.user_code,
    shown.ad_code,
    shown.surface_code as surface,
    cast(hour(shown.timestamp at time zone $timezone) as utinyint) as hour,
    epoch_us(shown.timestamp) as timestamp_us,
    shown.position,
    cast(coalesce(earlier.num_events, 0) + counted.num_before as integer) as end_offset,
    cast('0x' || substr(md5(shown.request_id || ':' || shown.ad_id), 1, 8) as bigint) < $negative_rate * 4294967296 as sampled,
    shown.propensity,
    shown.split
from shown
join counted on counted.row_id = shown.row_id
left join earlier on earlier.user_code = shown.user_code
order by shown.row_id
