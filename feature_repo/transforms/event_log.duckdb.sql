-- Events that became known on a day, in the order in which a user's history grows:
-- (user_code, available_us, time_us, event_id). available_us = greatest(event time, time of knowing), so the events
-- with available_us < t are exactly those that happened before t and were known before t.
-- An event is never available before the day that holds it starts ($floor_us; the first day holds older events too).
-- Events without a time are put one minute apart in sequence order, the last one a second before the day starts.
-- Inputs: engagements, outcomes (of the day), impressions (of the day), shown (impressions back to the longest
-- attribution window), kinds(name, code), surfaces(name, code), users, ads (catalogue of the day).
-- Parameters: day_start_us, floor_us, impression_kind ('' keeps impressions out of histories).
with engaged as (
    select
        user_id,
        item_id,
        kind,
        surface,
        0 as origin,
        event_id,
        cast(0 as bigint) as second_id,
        coalesce(
            epoch_us(timestamp),
            $day_start_us - 1000000 - 60000000 * (
                row_number() over (
                    partition by user_id, timestamp is null order by sequence_number desc, event_id desc
                ) - 1
            )
        ) as time_us,
        coalesce(epoch_us(known_at), epoch_us(timestamp)) as known_us
    from engagements
),
reacted as (
    select
        shown.user_id,
        outcomes.ad_id as item_id,
        outcomes.label as kind,
        shown.surface,
        1 as origin,
        outcomes.request_id as event_id,
        outcomes.ad_id as second_id,
        epoch_us(outcomes.event_time) as time_us,
        epoch_us(outcomes.known_at) as known_us
    from outcomes
    join shown on shown.request_id = outcomes.request_id and shown.ad_id = outcomes.ad_id
    where outcomes.value > 0
),
exposed as (
    select
        user_id,
        ad_id as item_id,
        $impression_kind as kind,
        surface,
        2 as origin,
        request_id as event_id,
        ad_id as second_id,
        epoch_us(timestamp) as time_us,
        epoch_us(timestamp) as known_us
    from impressions
    where $impression_kind <> ''
),
events as (
    select * from engaged
    union all
    select * from reacted
    union all
    select * from exposed
)
select
    users.user_code,
    ads.ad_code as item_code,
    events.time_us,
    kinds.code as kind,
    surfaces.code as surface,
    greatest(events.time_us, coalesce(events.known_us, events.time_us), $floor_us) as available_us
from events
join kinds on kinds.name = events.kind
join users on users.user_id = events.user_id
join ads on ads.ad_id = events.item_id
left join surfaces on surfaces.name = events.surface
order by user_code, available_us, time_us, origin, event_id, second_id
