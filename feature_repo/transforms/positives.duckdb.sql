-- The positives of a day in the columns of impressions, for logs that have none, and when each of them happened.
-- A request is asked when its event became available: then its history is what was available strictly before.
-- Events without a time are history only. Inputs: engagements (of the day). Parameters: label, floor_us.
select
    event_id as request_id,
    item_id as ad_id,
    0::smallint as position,
    user_id,
    surface,
    greatest(timestamp, known_at, make_timestamptz($floor_us)) as timestamp,
    null::float as propensity,
    null::varchar as split,
    timestamp as happened_at
from engagements
where kind = $label and timestamp is not null
order by timestamp, request_id
