-- What became known on a day, counted by user and by ad: impressions, engagements, and positive outcomes by label.
-- A row has either user_code or ad_code. num_all counts everything; num_timed leaves out engagements without a time,
-- which happened before the day (they enter all-time counts, not windows).
-- Inputs: impressions, outcomes, engagements (of the day), shown (impressions back to the longest attribution window),
-- labels(name, code), users, ads (catalogue of the day). Measures: 0 impressions, 1 engagements, 2 + code of the label.
with facts as (
    select user_id, ad_id, 0 as measure, true as timed from impressions
    union all
    select user_id, item_id as ad_id, 1 as measure, timestamp is not null as timed from engagements
    union all
    select shown.user_id, shown.ad_id, 2 + labels.code as measure, true as timed
    from outcomes
    join labels on labels.name = outcomes.label
    join shown on shown.request_id = outcomes.request_id and shown.ad_id = outcomes.ad_id
    where outcomes.value > 0
),
coded as (
    select users.user_code, ads.ad_code, facts.measure, facts.timed
    from facts
    join users on users.user_id = facts.user_id
    join ads on ads.ad_id = facts.ad_id
)
select
    user_code,
    ad_code,
    measure,
    count(*) as num_all,
    count(*) filter (where timed) as num_timed
from coded
group by grouping sets ((user_code, measure), (ad_code, measure))
